"""Rank 1 of one model after another: `python other_rank.py HOST:PORT CONFIG.json ...`, each with the options of one."""

import sys
from pathlib import Path

import msgspec

from penstock.cli.worker import Follower, obey
from penstock.engine.build import load
from penstock.engine.config import EngineConfig
from penstock.engine.options import address_of
from penstock.engine.parallel.rendezvous import Launch, joined

if __name__ == "__main__":
    host, port = address_of(sys.argv[1])
    with joined(Launch(host=host, port=port), 1, 60.0) as (ranks, _):
        for path in map(Path, sys.argv[2:]):
            config = msgspec.json.decode(path.read_bytes(), type=EngineConfig)
            loaded = load(Path(str(config.model)), config, ranks)
            obey(ranks, config, loaded.device, Follower(loaded, config).orders)
