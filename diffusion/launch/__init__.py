"""Launch jobs from a YAML job spec: locally, or on Slurm, Kubernetes, SageMaker, SkyPilot or MosaicML."""
