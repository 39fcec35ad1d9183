"""``python -m flashhopper.cli``, for where the script is not on PATH."""

import sys

from flashhopper.cli import main

if __name__ == "__main__":
    sys.exit(main())
