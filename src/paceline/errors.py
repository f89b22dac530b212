"""The one exception a user is meant to see."""


class PacelineError(Exception):
    """A mistake that the user can mend: the message says what was wrong, the value, and what to do."""
