"""Entry point of `python -m diffusion`, an alias of the `diffusion` command."""

import sys

from diffusion.cli import main

if __name__ == '__main__':
    sys.exit(main())
