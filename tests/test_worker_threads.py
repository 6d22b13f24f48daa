"""Work that several threads share: who computes what, torch's setting, exceptions."""

import gc
import multiprocessing
import os
import threading
import time
import weakref

import pytest
import torch

from gpy_iterative import worker_threads
from gpy_iterative.worker_threads import PARTS_PER_THREAD, divided, num_threads, run, shares


@pytest.fixture(autouse=True)
def two_threads() -> None:
    torch.set_num_threads(2)


def in_another_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def met(rendezvous: threading.Barrier):
    """A task that ends only when another thread runs the same at the same time."""
    rendezvous.wait(timeout=30)
    return threading.get_ident(), torch.get_num_threads()


def test_two_threads_work_at_the_same_time_each_with_one_of_torchs():
    rendezvous = threading.Barrier(2)
    (first, one), (second, other) = run([lambda: met(rendezvous)] * 2)
    assert first != second
    assert one == other == 1


def test_results_come_in_the_order_of_the_tasks():
    assert run([lambda number=number: time.sleep(0.002 * (5 - number)) or number for number in range(5)]) == [*range(5)]
    assert run([]) == []


def test_torchs_setting_is_honoured_and_left():
    torch.set_num_threads(1)
    assert {ident for ident, _ in run([lambda: (threading.get_ident(), None)] * 4)} == {threading.get_ident()}
    torch.set_num_threads(2)
    with divided():
        assert torch.get_num_threads() == 1
        assert num_threads() == 2
        assert in_another_thread(torch.get_num_threads) == 2
        with divided():
            assert num_threads() == 2
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    assert in_another_thread(torch.get_num_threads) == 2


def test_the_setting_is_left_after_an_exception():
    with pytest.raises(KeyError), divided():
        raise KeyError
    assert torch.get_num_threads() == 2
    assert in_another_thread(torch.get_num_threads) == 2


def test_an_exception_ends_the_work_and_is_raised():
    begun = []

    def task(number: int) -> None:
        begun.append(number)
        if number == 1:
            raise ValueError("the second one")
        time.sleep(0.05)

    with pytest.raises(ValueError, match="the second one"):
        run([lambda number=number: task(number) for number in range(50)])
    assert len(begun) < 10
    assert torch.get_num_threads() == 2


def test_grad_mode_and_inference_mode_are_the_callers():
    def modes():
        rendezvous.wait(timeout=30)
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    rendezvous = threading.Barrier(2)
    assert run([modes] * 2) == [(True, False)] * 2
    with torch.no_grad():
        assert run([modes] * 2) == [(False, False)] * 2
    with torch.inference_mode():
        assert run([modes] * 2) == [(False, True)] * 2


def test_several_threads_divide_their_work_at_once():
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(run([lambda number=number: number for number in range(9)])))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[*range(9)]] * 8
    assert torch.get_num_threads() == in_another_thread(torch.get_num_threads) == 2


def test_all_workers_have_begun_with_the_first_work():
    worker_threads._forget_pool()  # as in a child process
    run([lambda: None] * 2)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("gpy_iterative-worker")]
    started = threading.active_count()
    run([lambda: time.sleep(0.01)] * 8)
    assert len(threads) >= 2
    assert threading.active_count() == started


class Large:
    """Stands for an operator with its tiles."""


def test_workers_that_never_get_to_run_keep_nothing_alive():
    end = threading.Event()
    busy = [worker_threads._pool.workers.submit(end.wait, 60) for _ in range(max(os.cpu_count() or 1, 2))]
    gc.disable()
    try:
        large = Large()
        alive = weakref.ref(large)
        assert run([lambda large=large: id(large)] * 3) == [id(large)] * 3
        del large
        assert alive() is None
    finally:
        gc.enable()
        end.set()
        for worker in busy:
            worker.result()


def test_an_accelerator_is_given_work_by_the_calling_thread_alone():
    own = threading.get_ident()
    assert run([threading.get_ident] * 8, torch.device("cuda")) == [own] * 8


def test_shares_are_neighbours_of_nearly_the_same_number():
    items = [*range(41)]
    parts = shares(items)
    assert len(parts) == 2 * PARTS_PER_THREAD
    assert [item for part in parts for item in part] == items
    assert max(map(len, parts)) <= min(map(len, parts)) + 1
    assert shares([]) == [[]]
    assert shares([7]) == [[7]]
    torch.set_num_threads(1)
    assert shares(items) == [items]


def _run_in_child(answers: "multiprocessing.queues.Queue[list[int]]") -> None:
    answers.put(run([lambda number=number: number for number in range(4)]))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own():
    run([lambda: None] * 4)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_run_in_child, args=(answers,), daemon=True)
    child.start()
    assert answers.get(timeout=60) == [0, 1, 2, 3]
    child.join()
