"""The Kubernetes API as orca-infra needs it: `client.Kube`. The only importer of lightkube."""
