"""An executor under many threads: which thread gets which response, and how it ends."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from penstock.engine.errors import EngineUnavailable, GenerationFailed, InvalidRequest
from penstock.llm.executor import Executor
from penstock.llm.executor.requests import Request, SamplingConfig
from penstock.llm.executor.responses import FinishReason, Response
from tests.fakes import ids, letter_after, make_core, runner_of
from tests.llm.executors import ask, context_over, executor_over, make_executor, output, result_of, whole


def together(*works: Callable[[], object]) -> None:
    """Runs each in a thread of its own, and raises what one of them raised."""
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def said(prompt: str, num_tokens: int) -> list[int]:
    """What the fake model says."""
    tokens = ids(prompt)
    for _ in range(num_tokens):
        tokens.append(letter_after(tokens))
    return tokens[len(ids(prompt)) :]


def test_a_request_has_one_response_with_its_input_and_output() -> None:
    with make_executor() as executor:
        request_id = executor.enqueue_request(Request(ids("hello"), 6, client_id=7))
        [response] = executor.await_responses(request_id)
        assert (response.request_id, response.client_id, response.has_error()) == (request_id, 7, False)
        assert response.result.output_token_ids == [ids("hello") + said("hello", 6)]
        assert response.result.finish_reasons == [FinishReason.LENGTH]
        assert response.result.is_final
        assert response.result.is_sequence_final
        assert result_of(executor, ask("hello", 6)).output_token_ids == [said("hello", 6)]


def test_streamed_responses_add_up_to_the_whole_and_never_hold_the_input() -> None:
    with make_executor() as executor:
        responses = whole(executor, Request(ids("hello"), 6, streaming=True))
        assert len(responses) == 6
        assert output(responses) == said("hello", 6)
        responses = whole(executor, ask("hello", 6, streaming=True, return_all_generated_tokens=True))
        assert [response.result.output_token_ids for response in responses] == [[said("hello", length)] for length in range(1, 7)]


@pytest.mark.parametrize("streaming", [False, True])
def test_several_sequences_interleave_and_only_the_last_of_all_is_final(streaming: bool) -> None:
    config = SamplingConfig(num_return_sequences=3, temperature=1.0, seed=1)
    with make_executor() as executor:
        responses = whole(executor, ask("hi", 6, streaming=streaming, sampling_config=config))
    results = [response.result for response in responses]
    assert Counter(result.sequence_index for result in results if result.is_sequence_final) == {0: 1, 1: 1, 2: 1}
    assert [result.is_final for result in results] == [False] * (len(results) - 1) + [True]
    order = [result.sequence_index for result in results]
    assert (order == [0, 1, 2] * 6) if streaming else (sorted(order) == [0, 1, 2])
    outputs = {index: output(responses, index) for index in range(3)}
    assert all(len(tokens) == 6 for tokens in outputs.values())
    assert len({tuple(tokens) for tokens in outputs.values()}) == 3


@pytest.mark.parametrize("is_async", [False, True])
def test_threads_lose_nothing_and_get_nothing_twice(is_async: bool) -> None:
    num_threads, num_requests = 4, 15
    collected: list[Response] = []
    cancelled: set[int] = set()
    finished: dict[int, list[int]] = {}
    lock = threading.Lock()
    all_enqueued = threading.Event()

    with make_executor(num_blocks=64, max_num_seqs=8, max_model_len=100, is_async=is_async) as executor:

        def enqueue(seed: int) -> None:
            chance = random.Random(seed)
            for number in range(num_requests):
                prompt, length = f"{seed}:{number}", chance.randint(1, 12)
                request_id = executor.enqueue_request(ask(prompt, length, streaming=chance.random() < 0.5))
                with lock:
                    assert request_id not in finished
                    finished[request_id] = said(prompt, length)
                if chance.random() < 0.2:
                    executor.cancel_request(request_id)
                    with lock:
                        cancelled.add(request_id)

        def collect() -> None:
            while not all_enqueued.is_set() or executor.num_responses_ready() or executor._mailbox.num_open:
                responses = executor.await_responses(timeout=0.05)
                with lock:
                    collected.extend(responses)

        def produce() -> None:
            together(*(lambda seed=seed: enqueue(seed) for seed in range(num_threads)))
            all_enqueued.set()

        together(produce, collect, collect, collect)
    assert len(finished) == num_threads * num_requests
    assert Counter(response.request_id for response in collected if response.is_final) == dict.fromkeys(finished, 1)
    for request_id, tokens in finished.items():
        own = [response for response in collected if response.request_id == request_id]
        got = sorted(token_id for response in own for token_id in response.result.output_token_ids[0])
        last = next(response.result for response in own if response.is_final)
        if last.finish_reasons == [FinishReason.LENGTH]:
            assert got == sorted(tokens)
        else:
            assert request_id in cancelled
            assert not Counter(got) - Counter(tokens)


def test_each_waits_for_its_own_request() -> None:
    with make_executor() as executor:
        request_ids = executor.enqueue_requests([ask(f"prompt {number}", 4) for number in range(6)])
        assert len(set(request_ids)) == 6
        outputs: dict[int, list[list[int]]] = {}

        def wait(request_id: int) -> None:
            outputs[request_id] = result_of(executor, request_id).output_token_ids

        together(*(lambda request_id=request_id: wait(request_id) for request_id in request_ids))
        assert outputs == {request_id: [said(f"prompt {number}", 4)] for number, request_id in enumerate(request_ids)}


def test_several_ids_have_a_list_each_in_their_order() -> None:
    with make_executor() as executor:
        first, second = executor.enqueue_requests([ask("a", 5), ask("b", 1)])
        both = executor.await_responses([second, first])
        assert [[response.request_id for response in responses] for responses in both] == [[second], [first]]
        assert executor.await_responses([second, first]) == [[], []]
        assert executor.await_responses([]) == []


def test_waiting_ends_with_the_timeout_and_takes_nothing() -> None:
    core = make_core()
    runner_of(core).gate = gate = threading.Event()
    with executor_over(core) as executor:
        request_id = executor.enqueue_request(ask())
        assert executor.await_responses(request_id, timeout=0.01) == []
        assert executor.await_responses(timeout=0) == []
        assert executor.await_responses([request_id, request_id], timeout=0.01) == [[], []]
        assert executor.num_responses_ready() == executor.num_responses_ready(request_id) == 0
        gate.set()
        while not executor.num_responses_ready(request_id):
            time.sleep(0.001)
        assert executor.num_responses_ready() == 1
        assert len(executor.await_responses(timeout=0)) == 1


def test_no_thread_waits_for_what_has_been_given_already() -> None:
    with make_executor() as executor:
        request_id = executor.enqueue_request(ask())
        assert len(executor.await_responses(request_id)) == 1
        assert executor.await_responses(request_id) == []
        assert executor.num_responses_ready(request_id) == 0


@pytest.mark.parametrize("request_id", [0, -1, 2])
def test_an_unknown_id_is_an_error(request_id: int) -> None:
    with make_executor() as executor:
        whole(executor, ask())
        with pytest.raises(InvalidRequest, match=f"there has been no request {request_id}"):
            executor.await_responses(request_id)
        with pytest.raises(InvalidRequest):
            executor.await_responses([1, request_id])
        with pytest.raises(InvalidRequest):
            executor.num_responses_ready(request_id)
        with pytest.raises(InvalidRequest):
            executor.cancel_request(request_id)


def test_a_cancelled_request_ends_with_what_it_has_said() -> None:
    core = make_core()
    with executor_over(core) as executor:
        request_id = executor.enqueue_request(ask("hello", 190, streaming=True))
        [first, *_] = executor.await_responses(request_id)
        executor.cancel_request(request_id)
        rest = whole(executor, request_id)
        assert rest[-1].result.finish_reasons == [FinishReason.CANCELLED]
        tokens = output([first, *rest])
        assert tokens == said("hello", len(tokens))
        assert len(tokens) < 190
        executor.cancel_request(request_id)


def test_a_request_can_be_cancelled_before_it_begins() -> None:
    core = make_core()
    runner_of(core).gate = gate = threading.Event()
    with executor_over(core) as executor:
        request_ids = executor.enqueue_requests([ask(sampling_config=SamplingConfig(num_return_sequences=2)) for _ in range(5)])
        for request_id in request_ids:
            executor.cancel_request(request_id)
        for request_id in request_ids:
            reasons = [response.result.finish_reasons for response in whole(executor, request_id)]
            assert reasons == [[FinishReason.CANCELLED]] * 2
        gate.set()


def test_waiting_threads_are_woken_by_the_shutdown() -> None:
    core = make_core()
    runner_of(core).gate = threading.Event()
    got: list[object] = []
    with executor_over(core) as executor:
        waiting = executor.enqueue_request(ask("hello", 5))

        def shut_down() -> None:
            time.sleep(0.05)
            runner = runner_of(core)
            assert runner.gate is not None
            executor.shutdown(0)

        def wait_for_any() -> None:
            while responses := executor.await_responses():
                got.extend(responses)

        def wait_for_one() -> None:
            got.extend(executor.await_responses(waiting))

        together(shut_down, wait_for_any, wait_for_any, wait_for_one)
        [response] = got
        assert isinstance(response, Response)
        assert response.result.finish_reasons == [FinishReason.CANCELLED]
        assert not executor.can_enqueue_requests()
        assert executor.await_responses() == executor.await_responses(waiting) == []
        with pytest.raises(EngineUnavailable):
            executor.enqueue_request(ask())
        executor.cancel_request(waiting)
        executor.shutdown()


def test_an_executor_has_either_a_context_or_a_model() -> None:
    context = context_over(make_core())
    given: list[dict[str, Any]] = [{"model": "any"}, {"logits_processors": {"any": letter_after}}, {"max_model_len": 10}]
    for arguments in given:
        with pytest.raises(TypeError, match="a context brings its own"):
            Executor(context=context, **arguments)
    with pytest.raises(TypeError, match="did you mean `max_model_len`"):
        Executor(max_model_length=10)
    bounds: list[Any] = [-1, "x", 1.5]
    for bound in bounds:
        for name in ("iter_stats_max_iterations", "request_stats_max_iterations"):
            arguments = {name: bound}
            with pytest.raises(TypeError, match=f"`{name}` must be 0 or a positive integer"):
                Executor(context=context, **arguments)
    with pytest.raises(TypeError, match="`context` must be"):
        Executor(context=5)  # type: ignore[arg-type]
    context.close()


def test_a_shutdown_lets_requests_end_and_leaves_their_responses() -> None:
    with make_executor() as executor:
        assert executor.can_enqueue_requests()
        request_ids = executor.enqueue_requests([ask("hello", 20) for _ in range(4)])
        executor.shutdown()
        responses = executor.await_responses()
        assert sorted(response.request_id for response in responses) == request_ids
        assert all(response.result.finish_reasons == [FinishReason.LENGTH] for response in responses)


def test_an_error_in_the_block_cancels_what_runs() -> None:
    core = make_core()
    runner_of(core).gate = threading.Event()

    def fail(executor: Executor) -> None:
        executor.enqueue_request(ask())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), executor_over(core) as executor:
        fail(executor)
    [response] = executor.await_responses()
    assert response.result.finish_reasons == [FinishReason.CANCELLED]


def test_a_step_that_fails_ends_its_requests_and_no_others() -> None:
    core = make_core()
    with executor_over(core) as executor:
        runner_of(core).failure = ValueError("broken")
        failed = executor.enqueue_request(ask())
        [response] = whole(executor, failed)
        assert response.has_error()
        with pytest.raises(GenerationFailed, match="the model failed"):
            response.result  # noqa: B018 - raises
        runner_of(core).failure = None
        assert result_of(executor, ask("hello", 3)).output_token_ids == [said("hello", 3)]


def test_more_requests_than_places_are_served_in_order_of_priority() -> None:
    core = make_core(max_num_seqs=1)
    runner_of(core).gate = gate = threading.Event()
    with executor_over(core) as executor:
        first = executor.enqueue_request(ask("first", 1))
        time.sleep(0.05)  # until it is under way
        low, middle, high = executor.enqueue_requests([ask("low", 1, priority=0.1), ask("middle", 1), ask("high", 1, priority=0.9)])
        gate.set()
        order: list[int] = []
        while len(order) < 4:
            order += [response.request_id for response in executor.await_responses()]
    assert order == [first, high, middle, low]


def test_anything_but_requests_is_refused_and_nothing_is_enqueued() -> None:
    with make_executor() as executor:
        with pytest.raises(TypeError, match=r"expected a Request .* as requests\[1\], got 'hello'"):
            executor.enqueue_requests([ask(), "hello"])  # type: ignore[list-item]
        with pytest.raises(TypeError):
            executor.await_responses("1")  # type: ignore[arg-type]
        assert executor.enqueue_request(ask()) == 1


@pytest.mark.parametrize("timeout", ["1", float("nan"), True, [1]])
def test_what_is_no_time_is_refused_by_name_and_ends_nothing(timeout: Any) -> None:
    with make_executor() as executor:
        for call in (executor.await_responses, executor.shutdown):
            with pytest.raises(TypeError, match="`timeout` must be a number of seconds or a timedelta"):
                call(timeout=timeout)
        assert executor.can_enqueue_requests()


def test_a_timeout_longer_than_any_clock_is_none() -> None:
    with make_executor() as executor:
        assert executor.await_responses(executor.enqueue_request(ask()), timeout=float("inf"))
        assert executor.await_responses(executor.enqueue_request(ask()), timeout=1e300)
