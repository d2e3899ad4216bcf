"""How Serve's handles choose a replica: by `integrations/routing.py`, over the replicas that Serve says are there."""

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from penstock.integrations.routing import CAPACITY, Prefixes, Router, build_router


class PenstockRequestRouter(RequestRouter):
    """Loads are the requests that this handle has sent and that have not ended, and those that Serve knows of from others.

    Of the replicas that have the adapter, or the model, which is asked for, one is chosen; where none has, of all.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Serve calls it once, with the deployment's `request_router_kwargs`."""
        self._router: Router[ReplicaID] = build_router(kwargs.get("routing", "prefix"), capacity=kwargs.get("capacity", CAPACITY))
        self._sent: Counter[ReplicaID] = Counter()
        self._open: set[str] = set()  # the requests that are counted there: what all replicas get is not routed
        self._known: frozenset[ReplicaID] = frozenset()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The chosen one, then the others, the least loaded first: Serve asks each in turn whether it accepts."""
        candidates = {replica.replica_id: replica for replica in candidate_replicas}
        for gone in self._known - candidates.keys():
            self._router.forget(gone)
            self._sent.pop(gone, None)
        self._known = frozenset(candidates)
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # all replicas are tried each time
        loads = {replica_id: self._load(replica_id) for replica_id in candidates}
        model_id = pending_request.metadata.multiplexed_model_id
        have_model = {
            replica_id: loads[replica_id] for replica_id, replica in candidates.items() if model_id in replica.multiplexed_model_ids
        }
        chosen = self._router.choose(prefixes_of(pending_request), have_model or loads)
        others = sorted(loads.keys() - {chosen}, key=loads.__getitem__)
        return [[candidates[replica_id]] for replica_id in (chosen, *others)]

    def _load(self, replica_id: ReplicaID) -> int:
        return max(self._sent[replica_id], self.replica_queue_len_cache.get(replica_id) or 0)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        self._sent[replica_id] += 1
        self._open.add(pending_request.metadata.internal_request_id)
        self._router.routed(prefixes_of(pending_request), replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        if internal_request_id in self._open:
            self._open.remove(internal_request_id)
            self._sent[replica_id] -= self._sent[replica_id] > 0


def prefixes_of(request: PendingRequest) -> tuple[int, ...]:
    return next((argument.hashes for argument in request.args if isinstance(argument, Prefixes)), ())
