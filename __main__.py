"""`python -m penstock`: the same command line as `penstock` and `server.py`."""

import sys

from penstock.server import main

sys.exit(main())
