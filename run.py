"""Run the task of a recipe, on any number of devices: `composer run.py RECIPE [key=value ...]`."""

import sys

from diffusion.tasks.run_recipe import main

if __name__ == '__main__':
    sys.exit(main())
