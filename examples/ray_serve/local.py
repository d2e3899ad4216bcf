"""Several replicas behind one address on this machine, with a Ray of their own, until SIGINT or SIGTERM:

    python examples/ray_serve/local.py --port 8000 --replicas 2 -- --model DIR --threads 4

What follows `--` are flags of `penstock serve`. With `--autoscaling '{"min_replicas": 1, "max_replicas": 4}'` there are as many as the load
takes. SIGHUP replaces one replica after the other; each ends its requests first, as all do at SIGINT or SIGTERM. A second of these ends
them at once. On a cluster, use serve.yaml beside this file.
"""

import argparse
import json
import os
import queue
import secrets
import signal
import socket
import sys
import time

os.environ.pop("RAY_ADDRESS", None)  # of another Ray, which this one has nothing to do with
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "token")  # else any user of this machine could run code in this Ray
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

import ray
from ray import serve
from ray.serve.config import HTTPOptions

from penstock import ConfigurationError
from penstock.integrations.ray import app, ranks_per_replica

HOST, NAME = "127.0.0.1", "penstock"


def main() -> int:
    """Returns the exit code: 0 after a signal, 1 where the port is taken, 2 where the options are refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000, help="0: one that is free")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--autoscaling", type=json.loads, metavar="JSON", help="fields of Serve's AutoscalingConfig, for --replicas")
    parser.add_argument("--routing", default="prefix", choices=("prefix", "least-loaded", "round-robin", "random"))
    parser.add_argument("--object-store", type=int, default=100, metavar="MIB", help="memory for what Ray keeps; answers are not kept")
    parser.add_argument("flags", nargs="*", help="after `--`: flags of `penstock serve`")
    options = parser.parse_args()
    signals = queue.SimpleQueue[int]()
    number = {"num_replicas": options.replicas} if options.autoscaling is None else {"autoscaling": options.autoscaling}
    settings = {"flags": options.flags, "routing": options.routing, **number}
    version = 1
    try:
        application, num_ranks = app({**settings, "version": str(version)}), ranks_per_replica(settings)
        port = options.port or free_port()
        socket.create_server((HOST, port)).close()  # Serve would say in 70 lines that it is taken
    except ConfigurationError as error:
        print(f"penstock: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"penstock: error: cannot listen at {HOST}:{port}: {os.strerror(error.errno or 0)}", file=sys.stderr)
        return 1
    most = options.replicas if options.autoscaling is None else options.autoscaling.get("max_replicas", 1)  # Serve's default
    ray.init(
        address="local",
        num_cpus=most * num_ranks + 1,  # Ray's own count, by which it places replicas; it does not bind them
        object_store_memory=options.object_store * 2**20,
        include_dashboard=False,
        _node_ip_address=HOST,
    )
    try:
        catch_signals(signals)
        serve.start(http_options=HTTPOptions(host=HOST, port=port))
        serve.run(application, name=NAME, route_prefix="/")
        catch_signals(signals)  # Serve may have set others
        shown = f"{options.replicas} replicas" if options.autoscaling is None else f"Up to {most} replicas"
        print(f"{shown} answer at http://{HOST}:{port}/v1", flush=True)
        while signals.get() == signal.SIGHUP:
            version += 1
            try:
                application = app({**settings, "version": str(version)})
            except ConfigurationError as error:  # of a file that has changed
                print(f"penstock: error: {error}; the replicas stay as they are", file=sys.stderr)
                continue
            serve.run(application, name=NAME, route_prefix="/")
            print("all replicas are new", flush=True)
        drain(signals)
        return 0
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()


def catch_signals(signals: "queue.SimpleQueue[int]") -> None:
    """In place of the handlers that Ray sets: with these, SIGTERM during the start would end the process by SIGABRT."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, lambda sent, _: signals.put(sent))


def drain(signals: "queue.SimpleQueue[int]") -> None:
    """Waits until the replicas have ended their requests, for --drain-timeout at most, or until a second signal.

    `serve.shutdown` ends the proxy at once, and all streams with it.
    """
    serve.delete(NAME, _blocking=False)  # which would wait for a minute and no longer
    while NAME in serve.status().applications and signals.empty():
        time.sleep(0.1)


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
