"""``python -m cudnn_core`` is the command ``cudnn-core``."""

import sys

from ._cli import main

if __name__ == "__main__":
    sys.exit(main())
