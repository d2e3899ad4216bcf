"""The application for Ray Serve: `serve run penstock.integrations.ray:app`, with its options as words or in Serve's file.

Two deployments: an ingress, which reads requests and has no model, and the replicas of the server, which a router of our own chooses from.
"""

import math
import shlex
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingContext, RequestRouterConfig

from penstock.engine.errors import ConfigurationError
from penstock.integrations.embedded import read_flags
from penstock.integrations.ray.ingress import Ingress
from penstock.integrations.ray.replica import Replica
from penstock.integrations.routing import CAPACITY, RoutingName
from penstock.serving.models.file import read_models_file

POLICY = "penstock.integrations.ray.application:by_load"
ROUTER = "penstock.integrations.ray.router:PenstockRequestRouter"
SHUTDOWN_SECONDS = 10.0  # beside the time for requests to end
HEALTH_SECONDS = 2.0  # between checks, three of which have to fail: with Serve's own, a failed engine stays for half a minute


class Options(Struct, kw_only=True, forbid_unknown_fields=True):
    """What a deployment has beside the flags of `penstock serve`.

    `num_cpus` and `num_gpus` are those of each rank: a replica of several ranks takes as many, in a placement group.
    With another `version` than before, Serve replaces one replica after the other, each of which ends its requests first.
    `router_capacity` is how many prefixes each ingress remembers with the routing `prefix`, in some 400 bytes each.
    `autoscaling` has fields of Serve's `AutoscalingConfig`; its `target_ongoing_requests` are sequences of a replica, running or waiting.
    """

    flags: str | list[str] = ""
    num_replicas: int | None = None
    autoscaling: dict[str, Any] | None = None
    num_cpus: float = 1
    num_gpus: float = 0
    max_ongoing_requests: int = 256
    max_queued_requests: int = -1
    routing: RoutingName = "prefix"
    router_capacity: Annotated[int, Meta(ge=1)] = CAPACITY
    ingress_replicas: int = 1
    ingress_cpus: float = 0  # else two replicas and an ingress would wait for a third core
    placement_strategy: str = "STRICT_PACK"
    version: str | None = None

    @property
    def words(self) -> list[str]:
        return shlex.split(self.flags) if isinstance(self.flags, str) else self.flags


def read_options(given: dict[str, Any]) -> Options:
    """Raises `ConfigurationError`, also for options that contradict each other."""
    try:
        options = msgspec.convert(given, Options, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"the options of the application: {error}") from error
    if options.autoscaling is not None and options.num_replicas is not None:
        raise ConfigurationError("`num_replicas` and `autoscaling` exclude each other")
    return options


def app(given: dict[str, Any]) -> Application:
    """Builds the application. Raises `ConfigurationError` for flags that the server refuses, before anything is deployed."""
    options = read_options(given)
    arguments = read_flags(options.words)
    if arguments.models is not None:
        read_models_file(arguments)  # raises
    max_adapters = arguments.engine.max_cpu_loras if arguments.server.adapter_dir is not None else 0
    router: dict[str, Any] = {
        "request_router_class": ROUTER,
        "request_router_kwargs": {"routing": options.routing, "capacity": options.router_capacity},
    }
    settings: dict[str, Any] = {
        "name": "penstock",
        "max_ongoing_requests": options.max_ongoing_requests,
        "max_queued_requests": options.max_queued_requests,
        "graceful_shutdown_timeout_s": arguments.drain_timeout + SHUTDOWN_SECONDS,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": HEALTH_SECONDS,
        "request_router_config": RequestRouterConfig(**router),
    }
    if options.autoscaling is None:
        settings["num_replicas"] = options.num_replicas or 1
    else:
        settings["autoscaling_config"] = AutoscalingConfig(**{"policy": {"policy_function": POLICY}, **options.autoscaling})
    num_ranks = arguments.engine.num_ranks
    rank = {"CPU": options.num_cpus} | ({"GPU": options.num_gpus} if options.num_gpus else {})
    if num_ranks > 1:
        settings["placement_group_bundles"] = [rank] * num_ranks
        settings["placement_group_strategy"] = options.placement_strategy
    settings["ray_actor_options"] = {"num_cpus": options.num_cpus, "num_gpus": options.num_gpus}
    replicas = serve.deployment(**settings)(Replica).bind(
        options.words, max_adapters, is_one_node=options.placement_strategy == "STRICT_PACK", version=options.version
    )
    deployed = serve.deployment(
        name="ingress",
        num_replicas=options.ingress_replicas,
        max_ongoing_requests=100_000,  # the replicas have the bound
        ray_actor_options={"num_cpus": options.ingress_cpus},
        graceful_shutdown_timeout_s=arguments.drain_timeout + SHUTDOWN_SECONDS,
    )
    return deployed(Ingress).bind(replicas, is_multiplexed=max_adapters > 0)


def ranks_per_replica(given: dict[str, Any]) -> int:
    """How many processes each replica of `app(given)` takes. Raises `ConfigurationError` as `app` does."""
    return read_flags(read_options(given).words).engine.num_ranks


def by_load(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """A policy for Serve's autoscaling: as many replicas as it takes for each to have `target_ongoing_requests` sequences.

    Counts those that run and that wait in the engines, and what waits in Serve for a replica. Serve applies its delays, factors and bounds.
    """
    stats = context.aggregated_metrics or {}
    in_engines = math.fsum(value for name in ("running", "waiting") for value in stats.get(name, {}).values())
    load = in_engines + (context.total_queued_requests or 0.0)
    if not stats:  # replicas that have said nothing yet, or models that do not generate: what Serve counts itself
        load = context.total_num_requests
    assert context.config is not None, "Serve asks a policy only where there is autoscaling"
    return load / context.config.get_target_ongoing_requests(), {}
