-- Run clusters: what a start waits for, and since when an `up` of unknown end may have made one of its objects.

alter table orca.run_clusters alter column cpu_millis type bigint;
alter table orca.run_clusters add column waiting text not null default '';

-- Set when a cohort declares the object first, and taken back when the server's answer, or the engine's, says that nothing was
-- made. Longer ago than a finished Job is kept: it may have run and gone, and is not declared again.
alter table orca.kube_objects add column declared_at timestamptz;
update orca.kube_objects o set declared_at = c.begun_at from orca.cohorts c where c.stack = o.cohort and o.uid is null;
