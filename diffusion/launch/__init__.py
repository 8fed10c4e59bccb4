"""Job launching from a YAML spec: locally, or on Slurm, Kubernetes, SageMaker, SkyPilot or the MosaicML platform."""
