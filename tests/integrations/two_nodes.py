"""A Ray of two nodes on this machine, as a program: prints a line of JSON when it has started, and ends with its input.

`RAY_TMPDIR` is where Ray keeps its files. For each line of input, it prints which node each bundle of each placement group is on.
"""

import json
import sys
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

HOST = "127.0.0.1"
MEMORY = 100 * 2**20


def main() -> None:
    common: dict[str, Any] = {"num_cpus": 1, "object_store_memory": MEMORY}
    head = {"include_dashboard": True, "dashboard_host": HOST, "dashboard_port": 0}
    cluster = Cluster(initialize_head=True, head_node_args={**common, **head})
    cluster.add_node(**common)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        nodes = [node["NodeID"] for node in ray.nodes()]  # type: ignore[no-untyped-call]
        print(json.dumps({"dashboard": f"http://{cluster.webui_url}", "nodes": nodes}), flush=True)
        for _ in sys.stdin:
            groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
            print(json.dumps([group["bundles_to_node_id"] for group in groups]), flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
