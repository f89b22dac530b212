"""The kernels' pool of threads: there when wanted, silent when idle, and no trap for forks and other Python threads."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from native_lab import native, needs_kernels, opened, prompt, rows, same_bits, threads
from torch import Tensor

from paceline.native import interface

pytestmark = needs_kernels

BEFORE, NEXT = prompt(41, seed=1), prompt(33, seed=2)


def test_the_caller_is_one_of_the_threads() -> None:
    alone = psutil.Process().num_threads()
    for count in (3, 2):
        with threads(count):
            assert psutil.Process().num_threads() == alone + count - 1
    assert psutil.Process().num_threads() == alone


@pytest.mark.parametrize("count", [0, -1])
def test_there_is_always_the_caller(count: int) -> None:
    assert interface.kernels().pl_set_threads(count) == 1


def test_an_idle_pool_uses_no_processor() -> None:
    with threads(3):
        rows(native("plain"), opened(native("plain"), BEFORE), NEXT)
        time.sleep(0.02)  # a worker looks out for more work before it sleeps, for far less than that
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.03


def test_a_pool_that_slept_wakes_up_for_the_next_forward() -> None:
    sequence = opened(native("plain"), BEFORE)
    expected = rows(native("plain"), sequence, NEXT)
    with threads(3):
        for _ in range(5):
            time.sleep(0.005)
            assert same_bits(rows(native("plain"), sequence, NEXT), expected)


def test_a_change_of_threads_waits_for_the_work_that_runs() -> None:
    """A second model may be loaded beside an engine that computes."""
    expected = rows(native("plain"), opened(native("plain"), BEFORE), NEXT)
    done = threading.Event()

    def compute() -> int:
        with torch.inference_mode():
            sequence = opened(native("plain"), BEFORE)
            wrong = sum(not same_bits(rows(native("plain"), sequence, NEXT), expected) for _ in range(300))
        done.set()
        return wrong

    with threads(2), ThreadPoolExecutor(1) as beside:
        wrong = beside.submit(compute)
        for count in itertools.cycle((1, 3, 2)):
            if done.wait(0.0005):
                break
            interface.kernels().pl_set_threads(count)
        assert wrong.result() == 0


FORK = """
import os
import torch
from native_lab import interface, native, opened, prompt, rows

torch.set_num_threads(1)
with torch.inference_mode():
    decoder, kernels = native("plain"), interface.kernels()
    kernels.pl_set_threads(3)
    sequence = opened(decoder, prompt(41))
    expected = rows(decoder, sequence, prompt(33))
    child = os.fork()
    if child == 0:
        for threads in (3, 2, 4):
            same = torch.equal(rows(decoder, sequence, prompt(33)), expected)
            os.write(1, b"y" if same else b"n")
            kernels.pl_set_threads(threads)
        os._exit(0)
    print("child", os.waitpid(child, 0)[1], torch.equal(rows(decoder, sequence, prompt(33)), expected))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_computes_with_what_it_has() -> None:
    """The workers are not in the child; and a process whose workers sleep ends at once."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "yyychild 0 True\n"), done.stderr


FORK_AT_WORK = """
import os, signal, threading
import torch
from native_lab import interface, native, opened, prompt, rows

torch.set_num_threads(1)
decoder = native("plain")
with torch.inference_mode():
    interface.kernels().pl_set_threads(2)
    linear, x = decoder.native_layers[0].qkv, torch.ones(64, 64)
    expected = linear(x)
    stop = threading.Event()

    @torch.inference_mode()
    def compute():
        sequence = opened(decoder, prompt(41))
        while not stop.is_set():
            rows(decoder, sequence, prompt(33))

    beside = threading.Thread(target=compute)
    beside.start()
    for _ in range(20):
        child = os.fork()
        if child == 0:
            signal.alarm(5)
            own = type(linear)(linear.parts, linear.bias)  # the memory of the other may be in use
            os._exit(0 if torch.equal(own(x), expected) else 1)
        print(os.waitpid(child, 0)[1], end=" ")
    stop.set()
    beside.join()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_forked_in_the_middle_of_a_job_begins_anew() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK_AT_WORK],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert (done.returncode, done.stdout) == (0, "0 " * 20), done.stderr


def forwards(name: str) -> Iterator[Tensor]:
    """The same batches again and again, those of few rows and of many."""
    decoder = native(name)
    sequence = opened(decoder, BEFORE)
    while True:
        for count in (33, 1, 5):
            yield rows(decoder, sequence, NEXT[:count])


def test_two_python_threads_with_a_decoder_each_get_the_right_bits() -> None:
    """They take turns in the one pool, a few calls of each forward at a time."""
    names = ("plain", "windows and norms behind")
    expected = {name: [out for out, _ in zip(forwards(name), range(3), strict=False)] for name in names}

    def run(name: str) -> int:
        with torch.inference_mode():
            outs = zip(forwards(name), range(90), strict=False)
            return sum(same_bits(out, expected[name][i % 3]) for out, i in outs)

    with threads(3), ThreadPoolExecutor(2) as both:
        assert list(both.map(run, names)) == [90, 90]
