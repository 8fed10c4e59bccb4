"""From a job's YAML to a running job, here or on Slurm, Kubernetes, SageMaker, SkyPilot or the MosaicML platform."""
