"""The policy pack: `pulumi preview --policy-pack policies`. Its rules are plain functions in orca_infra/policy."""

from orca_infra.policy.pack import serve

serve()
