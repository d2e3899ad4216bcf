"""The pool of models, over a loader that loads nothing."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.engine.errors import ConfigurationError, EngineUnavailable, ModelNotLoaded, NoSuchModel, QueueFull
from penstock.serving.models.file import ModelSpec
from penstock.serving.models.pool import Expectation, ModelPool, ModelState, PoolLimits, Resident, without_directories
from penstock.serving.options import Arguments

LIMITS = PoolLimits(num_bytes=2, wait_seconds=0, turn_seconds=3600, pause_seconds=0)


@dataclass
class Loader:
    """Models of one byte, or of as many as `sizes` says. What is loaded is in `loaded`, in order; `failures` are raised once each."""

    loaded: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    failures: dict[str, list[Exception]] = field(default_factory=dict)
    unfetched: dict[str, list[Exception]] = field(default_factory=dict)
    gate: asyncio.Event | None = None
    num_freed: int = 0

    async def fetch(self, spec: ModelSpec) -> Expectation:
        if self.unfetched.get(spec.name):
            raise self.unfetched[spec.name].pop(0)
        return Expectation(1, "generate")

    async def load(self, spec: ModelSpec) -> Resident:
        self.loads.append(spec.name)
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        if self.failures.get(spec.name):
            raise self.failures[spec.name].pop(0)
        self.loaded.append(spec.name)
        context = SimpleNamespace(name=spec.name, tasks=("generate",), max_model_len=8, engine=SimpleNamespace(is_healthy=True))
        return Resident(cast(Any, context), self.sizes.get(spec.name, 1))

    async def unload(self, resident: Resident) -> None:
        self.loaded.remove(cast(Any, resident.context).name)
        await asyncio.sleep(0)

    async def free(self) -> None:
        self.num_freed += 1


def spec(name: str, **settings: Any) -> ModelSpec:
    return ModelSpec(name=name, arguments=Arguments(), **settings)


def run(
    scenario: Callable[[ModelPool, Loader], Awaitable[None]],
    *specs: ModelSpec,
    limits: PoolLimits = LIMITS,
    loader: Loader | None = None,
    clock: Callable[[], float] | None = None,
) -> None:
    async def with_pool() -> None:
        ours = loader or Loader()
        settings = {} if clock is None else {"clock": clock}
        pool = ModelPool(specs or [spec(name) for name in "abcd"], ours, limits, **settings)
        await pool.start()
        try:
            await scenario(pool, ours)
        finally:
            await pool.stop()
        assert ours.loaded == []

    asyncio.run(with_pool())


async def use(pool: ModelPool, name: str) -> None:
    await pool.load(pool.find(name))


async def lent(pool: ModelPool, name: str) -> Resident:
    model = pool.find(name)
    return pool.take(model) or await pool.wait_for(model)


async def settled() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


def test_a_model_is_loaded_once_for_all_that_ask_for_it() -> None:
    async def scenario(pool: ModelPool, loader: Loader) -> None:
        assert [model.state for model in pool] == [ModelState.UNLOADED] * 4
        residents = await asyncio.gather(*(lent(pool, "a") for _ in range(5)))
        assert len(set(map(id, residents))) == 1
        assert loader.loads == ["a"]
        assert pool.find("a").num_users == 5
        for _ in residents:
            pool.release(pool.find("a"))

    run(scenario)


def test_names_are_those_of_models_aliases_and_adapters() -> None:
    async def scenario(pool: ModelPool, loader: Loader) -> None:
        assert pool.find("other") is pool.find("a")
        with pytest.raises(NoSuchModel, match=r"The model `x` does not exist\. Served here: a, other, b\."):
            pool.find("x")

    run(scenario, spec("a", aliases=("other",)), spec("b"))


def test_the_least_recently_used_model_makes_room() -> None:
    async def scenario(pool: ModelPool, loader: Loader) -> None:
        for name in ("a", "b", "a", "c"):
            await use(pool, name)
        assert loader.loaded == ["a", "c"]
        assert loader.num_freed == 1

    run(scenario, clock=ticking())


def ticking() -> Callable[[], float]:
    times = iter(range(10**9))
    return lambda: float(next(times))


def test_a_pinned_model_is_loaded_at_start_and_stays() -> None:
    async def scenario(pool: ModelPool, loader: Loader) -> None:
        assert loader.loaded == ["a"]
        for name in ("b", "c"):
            await use(pool, name)
        assert loader.loaded == ["a", "c"]
        pool.pin(pool.find("a"), is_pinned=False)
        await use(pool, "b")
        assert loader.loaded == ["c", "b"]

    run(scenario, spec("a", pin=True), *map(spec, "bc"), clock=ticking())


def test_a_pinned_model_that_cannot_be_loaded_ends_the_start() -> None:
    loader = Loader(failures={"a": [ConfigurationError("no weights")]})
    with pytest.raises(ConfigurationError, match="--models: the model `a` cannot be loaded: no weights"):
        run(cast(Any, None), spec("a", pin=True), loader=loader)
    with pytest.raises(ConfigurationError, match="the pinned models do not fit"):
        asyncio.run(ModelPool([spec(name, pin=True) for name in "abc"], Loader(), LIMITS).start())


def test_a_busy_model_stays_and_another_one_waits() -> None:
    async def scenario(pool: ModelPool, loader: Loader) -> None:
        for name in ("a", "b"):
            await lent(pool, name)
        waiting = asyncio.ensure_future(use(pool, "c"))
        await settled()
        assert loader.loaded == ["a", "b"]
        await use(pool, "a")  # further requests for a busy model are not held up within its turn
        pool.release(pool.find("b"))
        await waiting
        assert loader.loaded == ["a", "c"]
        pool.release(pool.find("a"))

    run(scenario)


def test_a_model_that_fits_does_not_wait_for_one_that_does_not() -> None:
    async def scenario(pool: ModelPool, loader: Loader) -> None:
        await lent(pool, "a")
        waiting = asyncio.ensure_future(use(pool, "big"))
        await settled()
        await use(pool, "c")
        pool.release(pool.find("a"))
        await waiting
        assert loader.loaded == ["big"]

    run(scenario, spec("a"), spec("big", num_bytes=2), spec("c"), loader=Loader(sizes={"big": 2}))


def test_after_its_turn_a_busy_model_takes_no_further_requests() -> None:
    async def scenario(pool: ModelPool, loader: Loader) -> None:
        for name in ("a", "b"):
            await lent(pool, name)
        waiting = asyncio.ensure_future(lent(pool, "c"))
        await settled()
        assert pool.take(pool.find("a")) is None
        late = asyncio.ensure_future(use(pool, "a"))
        await settled()
        assert not waiting.done()
        pool.release(pool.find("a"))
        await waiting
        assert loader.loaded == ["b", "c"]
        assert not late.done()
        pool.release(pool.find("b"))
        await late
        pool.release(pool.find("c"))

    run(scenario, limits=PoolLimits(num_bytes=2, wait_seconds=0, turn_seconds=0), clock=ticking())


def test_a_model_is_held_no_longer_than_another_is_waited_for() -> None:
    async def scenario(pool: ModelPool, loader: Loader) -> None:
        await lent(pool, "a")
        await lent(pool, "b")
        waiting = asyncio.ensure_future(use(pool, "c"))
        await settled()
        late = asyncio.ensure_future(use(pool, "a"))
        await settled()
        waiting.cancel()
        await late
        for name in "ab":
            pool.release(pool.find(name))

    run(scenario, limits=PoolLimits(num_bytes=2, wait_seconds=0, turn_seconds=0), clock=ticking())


def test_waiting_is_bounded_in_time_and_number() -> None:
    async def scenario(pool: ModelPool, loader: Loader) -> None:
        for name in ("a", "b"):
            await lent(pool, name)
        waiting = asyncio.ensure_future(use(pool, "c"))
        await settled()
        pool.find("c").load_seconds = 17.4
        with pytest.raises(QueueFull, match="1 requests wait for the model `c`") as full:
            await use(pool, "c")
        assert full.value.retry_after == 17
        with pytest.raises(EngineUnavailable, match="the model `c` waits for memory, which other models use: try again later") as refused:
            await waiting
        assert refused.value.retry_after == 17
        assert not pool.find("c").waiting
        for name in "ab":
            pool.release(pool.find(name))

    run(scenario, limits=PoolLimits(num_bytes=2, wait_seconds=0.01, max_waiting=1))


def test_a_load_that_fails_names_its_cause_and_is_tried_again() -> None:
    async def scenario(pool: ModelPool, loader: Loader) -> None:
        failures = await asyncio.gather(*(use(pool, "a") for _ in range(3)), return_exceptions=True)
        assert {str(failure) for failure in failures} == {"the model `a` cannot be loaded: weights.gguf is damaged"}
        assert all(isinstance(failure, ModelNotLoaded) for failure in failures)
        assert pool.find("a").state is ModelState.FAILED
        with pytest.raises(ModelNotLoaded, match="an internal error, which has been logged"):
            await use(pool, "a")
        await use(pool, "a")
        assert (pool.find("a").num_failures, pool.find("a").num_loads) == (2, 1)

    failures = [ConfigurationError("/home/me/weights.gguf is damaged"), ZeroDivisionError("secret")]
    run(scenario, loader=Loader(failures={"a": cast(Any, failures)}))


def test_a_model_whose_files_are_missing_makes_no_other_one_leave() -> None:
    async def scenario(pool: ModelPool, loader: Loader) -> None:
        await use(pool, "a")
        await use(pool, "b")
        with pytest.raises(ModelNotLoaded, match="the model `c` cannot be loaded: there is no such repository"):
            await use(pool, "c")
        assert loader.loaded == ["a", "b"]
        await use(pool, "c")
        assert len(loader.loaded) == 2

    run(scenario, loader=Loader(unfetched={"c": [ConfigurationError("there is no such repository")]}))


def test_right_after_a_failure_requests_get_it_at_once() -> None:
    async def scenario(pool: ModelPool, loader: Loader) -> None:
        for _ in range(3):
            with pytest.raises(ModelNotLoaded, match="no weights") as refused:
                await use(pool, "a")
            assert refused.value.retry_after == 9
        assert loader.loads == ["a"]

    limits = PoolLimits(num_bytes=2, wait_seconds=0, pause_seconds=9)
    run(scenario, limits=limits, loader=Loader(failures={"a": [ConfigurationError("no weights")]}))


def test_a_model_that_never_fits_is_refused() -> None:
    async def scenario(pool: ModelPool, loader: Loader) -> None:
        with pytest.raises(ModelNotLoaded, match=r"the model `a` does not fit: it takes about 0\.00 GiB"):
            await use(pool, "a")
        assert loader.loads == []

    run(scenario, spec("a", num_bytes=3))


def test_a_model_that_is_larger_than_expected_makes_room_afterwards() -> None:
    async def scenario(pool: ModelPool, loader: Loader) -> None:
        await use(pool, "a")
        await use(pool, "b")
        await settled()
        assert loader.loaded == ["b"]

    run(scenario, loader=Loader(sizes={"b": 2}))


def test_an_idle_model_is_unloaded_after_its_time() -> None:
    async def scenario(pool: ModelPool, loader: Loader) -> None:
        await use(pool, "a")
        await use(pool, "b")
        while loader.loaded != ["b"]:  # noqa: ASYNC110 - a time passes
            await asyncio.sleep(0.001)

    run(scenario, spec("a", ttl=0.005), spec("b"))


def test_a_client_that_leaves_while_its_model_loads_holds_nothing() -> None:
    async def scenario(pool: ModelPool, loader: Loader) -> None:
        loader.gate = asyncio.Event()
        waiting = asyncio.ensure_future(use(pool, "a"))
        await settled()
        waiting.cancel()
        loader.gate.set()
        await settled()
        assert (loader.loaded, pool.find("a").num_users, pool.find("a").waiting) == (["a"], 0, {})

    run(scenario)


def test_a_client_that_leaves_just_when_its_model_is_there_gives_it_back() -> None:
    async def scenario(pool: ModelPool, loader: Loader) -> None:
        model = pool.find("a")
        waiting = asyncio.ensure_future(pool.wait_for(model))
        await asyncio.sleep(0)
        while not model.num_users:  # noqa: ASYNC110 - until it is lent, in the middle of the pool's work
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert model.num_users == 0

    run(scenario)


def test_an_engine_that_has_failed_is_loaded_again() -> None:
    async def scenario(pool: ModelPool, loader: Loader) -> None:
        resident = await lent(pool, "a")
        cast(Any, resident.context.engine).is_healthy = False
        pool.release(pool.find("a"))
        await resident.closed.wait()
        await use(pool, "a")
        assert loader.loads == ["a", "a"]

    run(scenario)


def test_an_unload_waits_for_requests_and_the_next_one_loads_again() -> None:
    async def scenario(pool: ModelPool, loader: Loader) -> None:
        await lent(pool, "a")
        unloading = asyncio.ensure_future(pool.unload(pool.find("a")))
        await settled()
        assert not unloading.done()
        late = asyncio.ensure_future(use(pool, "a"))
        pool.release(pool.find("a"))
        await asyncio.gather(unloading, late)
        assert loader.loads == ["a", "a"]
        assert loader.loaded == ["a"]

    run(scenario)


def test_requests_that_wait_are_refused_when_the_server_stops() -> None:
    async def scenario(pool: ModelPool, loader: Loader) -> None:
        loader.gate = asyncio.Event()
        waiting = asyncio.ensure_future(use(pool, "a"))
        await settled()
        await pool.stop()
        with pytest.raises(EngineUnavailable, match="the server is shutting down"):
            await waiting
        with pytest.raises(EngineUnavailable, match="the server is shutting down"):
            await use(pool, "b")
        assert not pool.is_healthy

    run(scenario)


def test_any_order_of_requests_keeps_the_bound_and_serves_all() -> None:
    async def scenario(pool: ModelPool, loader: Loader) -> None:
        draw = random.Random(3)

        async def request(name: str) -> None:
            resident = await lent(pool, name)
            try:
                for _ in range(draw.randrange(5)):
                    assert name in loader.loaded
                    assert cast(Any, resident.context).name == name
                    assert len(loader.loaded) <= 2
                    await asyncio.sleep(0)
            finally:
                pool.release(pool.find(name))

        for _ in range(300):
            task = asyncio.ensure_future(request(draw.choice("abcd")))
            tasks.append(task)
            if draw.random() < 0.2:
                draw.choice(tasks).cancel()
            if draw.random() < 0.1:
                tasks.append(asyncio.ensure_future(pool.unload(pool.find(draw.choice("abcd")))))
            for _ in range(draw.randrange(8)):
                await asyncio.sleep(0)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(each) for each in ended} == {type(None), asyncio.CancelledError}

    tasks: list[asyncio.Future[None]] = []
    run(scenario, limits=PoolLimits(num_bytes=2, wait_seconds=0, turn_seconds=0), clock=ticking())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/me/models/a.gguf is damaged", "a.gguf is damaged"),
        ("--model ~/models/a: there is no such file", "--model a: there is no such file"),
        (
            "Qwen/Qwen3-0.6B cannot be downloaded: https://huggingface.co/x",
            "Qwen/Qwen3-0.6B cannot be downloaded: https://huggingface.co/x",
        ),
    ],
)
def test_clients_are_shown_no_directories(text: str, shown: str) -> None:
    assert without_directories(text) == shown
