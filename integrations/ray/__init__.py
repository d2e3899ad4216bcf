"""Penstock on Ray Serve (extra `ray`): replicas behind one address. See docs/scale.md."""

from penstock.integrations.ray.application import Options, app, by_load, ranks_per_replica

__all__ = ["Options", "app", "by_load", "ranks_per_replica"]
