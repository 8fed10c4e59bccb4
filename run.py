"""Every multi-device job starts here: `composer run.py RECIPE [key=value ...]`."""

import sys

from diffusion.tasks.run_recipe import main

if __name__ == '__main__':
    sys.exit(main())
