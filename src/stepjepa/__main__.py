"""``python -m stepjepa``; with several processes ``torchrun --nproc_per_node 2 -m stepjepa train ...``."""

import sys

from stepjepa.cli.main import main

sys.exit(main())
