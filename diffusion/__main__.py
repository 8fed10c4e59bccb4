"""`python -m diffusion`: the same as the `diffusion` command."""

import sys

from diffusion.cli import main

if __name__ == '__main__':
    sys.exit(main())
