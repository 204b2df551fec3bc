"""The training entry: `accelerate launch train/distill.py --config R.yaml --records DIR --out DIR`.

What can follow is told by --help; `draftsmith train` does the same in a run folder of its own.
"""

import sys

from draftsmith.scripts.distill import main

if __name__ == "__main__":
    sys.exit(main())
