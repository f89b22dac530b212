"""Where every n-gram of one length occurred, most recent first: hash chains in flat arrays of 32-bit numbers.

Positions count up for ever; position p lives in slot p % capacity, so a new one takes the place of the oldest. A link
below `oldest` leads to a position that is gone, and so does everything behind it: nothing has to be unlinked.
"""

from __future__ import annotations

from array import array

import numpy as np

NOWHERE = -1


class NgramChains:
    """`older[slot]` links an occurrence to the one before it of the same n-gram, known by a 31-bit key.

    Each bucket lists the latest occurrence of each of its n-grams, most recent first, so that a frequent n-gram never
    hides a rare one that shares its bucket. A new n-gram may add a bucket, by splitting one (linear hashing, Litwin
    1980): no insertion ever pays for a rebuild. 12 bytes a position and 4 a bucket, buckets <= positions.
    """

    def __init__(self, length: int, capacity: int) -> None:
        self.length = length
        self.older = array("i")
        self._capacity = capacity
        self._beside = array("i")  # next in the bucket: an older occurrence of another n-gram
        self._keys = array("i")
        self._buckets = array("i", [NOWHERE])
        self._mask = 0

    def grow(self, slots: int) -> None:
        """Make room for positions up to `slots`, which is at most the capacity."""
        more = bytes(4 * (slots - len(self.older)))
        for column in (self.older, self._beside, self._keys) if more else ():
            column.frombytes(more)

    def add(self, position: int, key: int, oldest: int) -> None:
        """Put the newest position in front of its n-gram's chain and of its bucket."""
        keys, beside, capacity = self._keys, self._beside, self._capacity
        bucket = self._bucket(key)
        before, front = NOWHERE, self._buckets[bucket]
        same, slot = front, position % capacity
        while same >= oldest and keys[same % capacity] != key:
            before, same = same, beside[same % capacity]
        if same < oldest:
            self.older[slot], beside[slot] = NOWHERE, front
        elif same == front:
            self.older[slot], beside[slot] = same, beside[same % capacity]
        else:
            beside[before % capacity] = beside[same % capacity]
            self.older[slot], beside[slot] = same, front
        keys[slot], self._buckets[bucket] = key, position
        if same < oldest and len(self._buckets) < len(keys):
            self._split(oldest)

    def latest(self, key: int, oldest: int) -> int:
        """The most recent position of an n-gram; below `oldest` if there is none."""
        position = self._buckets[self._bucket(key)]
        while position >= oldest and self._keys[position % self._capacity] != key:
            position = self._beside[position % self._capacity]
        return position

    @property
    def place(self) -> tuple[int, ...]:
        """For the kernels: buckets, mask, and where the columns lie; they move as they grow."""
        columns = (self._buckets, self._keys, self._beside, self.older)
        return len(self._buckets), self._mask, *(column.buffer_info()[0] for column in columns)

    def renumber(self, shift: int) -> None:
        """Take `shift`, a multiple of the capacity, from every position, so that they stay below 2**31."""
        for column in (self.older, self._beside, self._buckets):
            view = np.frombuffer(column, dtype=np.int32)
            np.maximum(view, shift + NOWHERE, out=view)
            view -= shift

    def _bucket(self, key: int) -> int:
        bucket = key & self._mask
        return bucket if bucket < len(self._buckets) else bucket & (self._mask >> 1)

    def _split(self, oldest: int) -> None:
        """Add a bucket and move into it what belongs there; both lists keep their order."""
        new, buckets, beside, capacity = len(self._buckets), self._buckets, self._beside, self._capacity
        if new > self._mask:
            self._mask = 2 * self._mask + 1
        source = new & (self._mask >> 1)
        position = buckets[source]
        buckets[source] = stays = moves = NOWHERE
        buckets.append(NOWHERE)
        while position >= oldest:
            slot = position % capacity
            if self._keys[slot] & self._mask == source:
                if stays == NOWHERE:
                    buckets[source] = position
                else:
                    beside[stays] = position
                stays = slot
            else:
                if moves == NOWHERE:
                    buckets[new] = position
                else:
                    beside[moves] = position
                moves = slot
            position, beside[slot] = beside[slot], NOWHERE
