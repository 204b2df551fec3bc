"""The collecting entry: `accelerate launch data/collect.py R.yaml [section.key=value ...]`.

The same as `draftsmith collect`; each process of several asks its share of the prompts.
"""

import sys

from draftsmith.scripts.cli import main

if __name__ == "__main__":
    sys.exit(main(["collect", *sys.argv[1:]]))
