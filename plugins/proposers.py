"""The proposers of draft tokens that come with the engine: `ngram` and `suffix`."""

from penstock.engine.contracts.hooks import Register, hookimpl
from penstock.engine.speculation.proposers import BUILT_IN


@hookimpl
def register_proposers(register: Register) -> None:
    for name, factory in BUILT_IN.items():
        register(name, factory)
