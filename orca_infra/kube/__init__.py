"""The Kubernetes API as orca-infra needs it: `client.Kube`, and `cache.Watched` over it. The only importer of lightkube."""
