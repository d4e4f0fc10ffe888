"""The cold tier: moving segments there, manifests for jobs, erasing, merging."""
