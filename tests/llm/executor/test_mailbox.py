"""Responses between threads."""

import asyncio
import random
import threading

import pytest

from penstock.engine.errors import InvalidRequest
from penstock.llm.executor.jobs import Mailbox
from penstock.llm.executor.responses import FinishReason, Response, Result


def response(request_id: int, index: int = 0, *, is_final: bool = False) -> Response:
    return Response(
        request_id,
        Result(
            is_final=is_final, is_sequence_final=is_final, sequence_index=index, output_token_ids=[[]], finish_reasons=[FinishReason.LENGTH]
        ),
    )


def test_what_is_ready_is_given_once_and_in_the_order_in_which_it_came() -> None:
    mailbox = Mailbox()
    first, second = mailbox.open(), mailbox.open()
    came = [response(first, 0), response(second, 0), response(first, 1)]
    for one in came:
        mailbox.put(one)
    assert mailbox.num_ready() == 3
    assert mailbox.num_ready(first) == 2
    assert mailbox.take(first, 0) == [came[0], came[2]]
    assert mailbox.take(None, 0) == [came[1]]
    assert mailbox.take(None, 0) == []


def test_a_call_that_waits_for_the_request_comes_before_one_that_waits_for_any() -> None:
    async def scenario() -> None:
        mailbox = Mailbox()
        request_id = mailbox.open()
        anyone = asyncio.create_task(mailbox.take_async(None))
        own = asyncio.create_task(mailbox.take_async(request_id))
        await asyncio.sleep(0)
        mailbox.put(response(request_id, 1))
        assert await own == [response(request_id, 1)]
        mailbox.put(response(request_id, 2))
        assert await anyone == [response(request_id, 2)]

    asyncio.run(scenario())


def test_a_final_response_sends_away_all_other_readers_of_the_request() -> None:
    async def scenario() -> None:
        mailbox = Mailbox()
        request_id = mailbox.open()
        waiting = [asyncio.create_task(mailbox.take_async(request_id)) for _ in range(3)]
        await asyncio.sleep(0)
        final = response(request_id, is_final=True)
        mailbox.put(final)
        assert await asyncio.gather(*waiting) == [[final], [], []]
        assert await mailbox.take_async(request_id) == []

    asyncio.run(scenario())


def test_what_a_reader_that_left_was_given_goes_to_the_next_or_comes_first_again() -> None:
    async def scenario(has_next: bool) -> list[Response]:
        mailbox = Mailbox()
        request_id = mailbox.open()
        leaving = asyncio.create_task(mailbox.take_async(request_id))
        await asyncio.sleep(0)
        staying = asyncio.create_task(mailbox.take_async(None)) if has_next else None
        await asyncio.sleep(0)
        mailbox.put(response(request_id, 1))
        leaving.cancel()
        if not has_next:
            mailbox.put(response(request_id, 2))
        await asyncio.wait([leaving])
        assert leaving.cancelled()
        return await mailbox.take_async(request_id) if staying is None else await staying

    assert asyncio.run(scenario(True)) == [response(1, 1)]
    assert asyncio.run(scenario(False)) == [response(1, 1), response(1, 2)]


def test_waiters_that_gave_up_get_nothing() -> None:
    mailbox = Mailbox()
    request_id = mailbox.open()
    assert mailbox.take(request_id, 0.001) == mailbox.take(None, 0.001) == []
    mailbox.put(response(request_id))
    assert mailbox.num_ready() == 1


def test_a_closed_mailbox_waits_for_what_is_open_and_no_longer() -> None:
    mailbox = Mailbox()
    request_id = mailbox.open()
    mailbox.close()
    assert not mailbox.wait_until_none_is_open(0.001)
    assert mailbox.take(None, 0.001) == []
    mailbox.put(Response(request_id, "an error is final"))
    assert mailbox.wait_until_none_is_open(None)
    assert len(mailbox.take(None, None)) == 1
    assert mailbox.take(None, None) == []


@pytest.mark.parametrize("request_id", [0, -3, 2])
def test_only_ids_that_were_given_out_are_known(request_id: int) -> None:
    mailbox = Mailbox()
    mailbox.check_known([mailbox.open()])
    with pytest.raises(InvalidRequest, match=str(request_id)):
        mailbox.check_known([request_id])


@pytest.mark.parametrize("request_id", ["1", 1.0, True, None])
def test_an_id_is_an_integer(request_id: object) -> None:
    mailbox = Mailbox()
    mailbox.open()
    with pytest.raises(TypeError):
        mailbox.check_known([request_id])  # type: ignore[list-item]


def test_nothing_is_lost_between_takers_that_come_and_go() -> None:
    mailbox, num_requests, num_each = Mailbox(), 20, 10
    request_ids = [mailbox.open() for _ in range(num_requests)]
    taken: list[Response] = []
    lock = threading.Lock()

    def take(seed: int) -> None:
        chance = random.Random(seed)
        while mailbox.num_open or mailbox.num_ready():
            got = mailbox.take(chance.choice([None, None, *request_ids]), chance.choice([0, 0.0005]))
            with lock:
                taken.extend(got)

    threads = [threading.Thread(target=take, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for place in range(num_each):
        for request_id in request_ids:
            mailbox.put(response(request_id, place, is_final=place == num_each - 1))
    for thread in threads:
        thread.join(60)
    assert sorted((one.request_id, one.result.sequence_index) for one in taken) == [
        (request_id, place) for request_id in request_ids for place in range(num_each)
    ]
