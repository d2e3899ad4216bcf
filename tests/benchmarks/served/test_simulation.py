"""The simulated replicas: the same at each run, nothing lost, and routers that differ in what they find in the caches."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.simulation import SHAPE, STEP_TIMES, Drain, Measured, Roofline, Simulation, Summary
from benchmarks.simulation_traffic import BLOCK_SIZE, PUBLISHED, Traffic, statistics_of
from penstock.integrations.routing import ROUTING_NAMES, RoutingName

H100 = STEP_TIMES["h100-8b"]


def test_the_traffic_is_of_the_published_shape() -> None:
    found = statistics_of(SHAPE, num_requests=2000, seed=3)
    assert found.mean_prompt == pytest.approx(PUBLISHED.mean_prompt, rel=0.15)
    assert found.mean_output == pytest.approx(PUBLISHED.mean_output, rel=0.15)
    assert found.best_hit_rate == pytest.approx(PUBLISHED.best_hit_rate, abs=0.06)


def test_a_turn_begins_with_the_blocks_of_the_turn_before() -> None:
    traffic = Traffic(replace(SHAPE, mean_turns=50), 1.0, 0)
    first = next(traffic.first_turns())
    before = list(first.conversation.extend(3 * BLOCK_SIZE))
    following = traffic.next_turn(first, 10.0)
    assert following is not None
    assert following.arrival > 10.0
    after = following.conversation.extend(2 * BLOCK_SIZE)
    assert after[: len(before)] == before
    assert len(after) > len(before)


def test_a_run_is_determined_by_its_seed() -> None:
    def run(seed: int) -> list[tuple[float, int]]:
        return [(turn.end, turn.replica) for turn in Simulation(H100, 2, "prefix", 2.0, seed=seed).run(60).turns]

    assert run(1) == run(1)
    assert run(1) != run(2)


@pytest.mark.parametrize(("rate", "limits"), [(2.0, {}), (4.0, {"max_num_seqs": 6}), (4.0, {"memory_bytes": 40e9})])
def test_steps_that_are_not_scheduled_one_by_one_change_nothing(rate: float, limits: dict[str, Any]) -> None:
    assert isinstance(H100, Roofline)
    step_time, drain = replace(H100, **limits), Drain(start=10.0, restart_seconds=2.0)

    def run(routing: RoutingName, *, is_merging: bool) -> tuple[int, list[tuple[float, float, float, int, int]]]:
        outcome = Simulation(step_time, 3, routing, rate, drain=drain, is_merging=is_merging).run(150)
        turns = [(turn.arrival, turn.first_token, turn.end, turn.replica, turn.cached_tokens) for turn in outcome.turns]
        return outcome.num_preemptions, turns

    outcomes = [run(routing, is_merging=True) for routing in ROUTING_NAMES]
    assert outcomes == [run(routing, is_merging=False) for routing in ROUTING_NAMES]
    assert any(num_preemptions for num_preemptions, _ in outcomes) == ("memory_bytes" in limits)


def test_every_request_is_answered_once_and_no_block_is_lost() -> None:
    simulation = Simulation(H100, 3, "least-loaded", 3.0)
    outcome = simulation.run(200)
    assert len({id(turn) for turn in outcome.turns}) == 200
    for turn in outcome.turns:
        assert turn.arrival < turn.first_token <= turn.end
        assert 0 <= turn.cached_tokens < turn.prompt_tokens
    for replica in simulation.replicas:
        replica.scheduler.check_integrity()


def test_affinity_finds_more_in_the_caches_than_chance() -> None:
    routings: tuple[RoutingName, ...] = ("prefix", "random")
    rates = {
        routing: Summary.of(Simulation(H100, 4, routing, 2.0).run(300), 4, ttft_bound=2.0, tpot_bound=0.05).hit_rate for routing in routings
    }
    assert rates["prefix"] > 1.5 * rates["random"] > 0


def test_a_drained_replica_ends_its_requests_and_returns_empty() -> None:
    simulation = Simulation(H100, 2, "prefix", 1.0, drain=Drain(start=5.0, restart_seconds=5.0))
    outcome = simulation.run(120)
    assert len(outcome.drain_seconds) == 2
    assert len(outcome.turns) == 120
    assert all(replica.scheduler.pool.num_cached < 773 for replica in simulation.replicas)


def test_the_measured_steps_are_those_of_the_profile() -> None:
    measured = Measured.read()
    points = dict(measured.decode_seconds)
    assert measured.seconds(8, 8, 800) == points[8]
    assert points[1] < measured.seconds(4, 4, 400) < points[8]
    assert measured.seconds(9, 8, 800) == points[8] + measured.prompt_seconds
