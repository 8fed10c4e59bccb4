"""Run the task of a recipe, on any number of devices: `composer run.py RECIPE [key=value ...]`."""

from diffusion.launch.workers import end_process
from diffusion.tasks.run_recipe import main

if __name__ == '__main__':
    end_process(main())
