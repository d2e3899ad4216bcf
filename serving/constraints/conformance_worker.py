"""The process in which answers are checked: one line of JSON in, one out. A line that takes too long ends the process."""

import os
import resource
import signal
import sys

import msgspec

from penstock.serving.constraints.conformance import conformance

MAX_BYTES = 2**30
NICENESS = 10  # the model's own threads go first


class Task(msgspec.Struct):
    """`seconds` is what checking may take."""

    schema: str
    answer: str
    seconds: float


def main() -> None:
    os.nice(NICENESS)
    sys.set_int_max_str_digits(0)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which closes the pipe
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for line in sys.stdin.buffer:
        task = msgspec.json.decode(line, type=Task)
        # The alarm's default action is to end the process: a handler in Python would wait for the regex that hangs.
        signal.setitimer(signal.ITIMER_REAL, task.seconds)
        answer = conformance(task.schema, task.answer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
