"""Threads that share an engine take turns, even if one of them takes the lock again at once."""

import threading
import time

from mmvllm.utils.fair_lock import FairLock
from mmvllm.utils.forks import OwnProcess


def test_a_thread_that_retakes_the_lock_gives_way_to_one_that_waits():
    lock, has_had_turn, is_busy = FairLock(OwnProcess()), threading.Event(), threading.Event()

    def other():
        is_busy.wait(10)
        with lock:
            has_had_turn.set()

    thread = threading.Thread(target=other)
    thread.start()
    num_turns = 0
    while not has_had_turn.is_set() and num_turns < 20:
        with lock:
            is_busy.set()
            num_turns += 1
            time.sleep(0.05)
    thread.join()
    assert num_turns < 20


def test_a_turn_may_be_taken_again_by_its_thread():
    lock = FairLock(OwnProcess())
    with lock, lock:
        pass
    with lock:
        pass
