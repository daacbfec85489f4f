-- Times that are more than five minutes ahead of the database's clock: what counts from them would come late or never. (Not
-- `least`, which takes a time that is missing for no limit.)

-- name: mend_machines
-- What a worker or this program wrote while a clock was wrong counts from now on. Never the rows of runs: they are orca's.
with seen as (
    update orca.workers set seen_at = case when seen_at > now() then now() else seen_at end,
        first_seen_at = case when first_seen_at > now() then now() else first_seen_at end
    where greatest(seen_at, first_seen_at) > now() + interval '5 minutes' returning name
), made as (
    update orca.pool_machines set created_at = case when created_at > now() then now() else created_at end,
        confirmed_at = case when confirmed_at > now() then now() else confirmed_at end
    where ended_at is null and greatest(created_at, confirmed_at) > now() + interval '5 minutes' returning name
), tried as (
    update orca.pool_status set tried_at = null, trying_since = null
    where greatest(tried_at, trying_since) > now() + interval '5 minutes' returning pool
), refused as (
    delete from orca.pool_offers where greatest(last_at, since) > now() + interval '5 minutes' returning pool
), ended as (
    update orca.pool_machines set ended_at = now() where ended_at > now() + interval '5 minutes' returning name
), heard as (
    update orca.hearing set since = now() where since > now() + interval '5 minutes' returning 'hearing' as name
)
select 'worker ' || name as row from seen union all select 'machine ' || name from made
union all select 'pool ' || pool from tried union all select 'offer of pool ' || pool from refused
union all select 'ended machine ' || name from ended union all select name from heard
order by 1

-- name: mend_runs
with made as (
    update orca.run_clusters set created_at = now()
    where ended_at is null and created_at > now() + interval '5 minutes' returning run, start
), waiting as (
    update orca.kube_objects set next_try_at = now()
    where scope = 'runs' and uid is null and next_try_at > now() + interval '5 minutes' returning name
), ended as (
    update orca.run_clusters set ended_at = now() where ended_at > now() + interval '5 minutes' returning run, start
)
select 'start ' || start || ' of run ' || run as row from made union all select 'object ' || name from waiting
union all select 'ended start ' || start || ' of run ' || run from ended
order by 1

-- name: mend_runtimes
-- When a runtime is culled is no clock's reading: that may be as far ahead as its pool says.
with pods as (
    update orca.runtime_pods set created_at = case when created_at > now() then now() else created_at end,
        ready_at = case when ready_at > now() then now() else ready_at end,
        unready_at = case when unready_at > now() then now() else unready_at end,
        taken_at = case when taken_at > now() then now() else taken_at end,
        ending_at = case when ending_at > now() then now() else ending_at end
    where ended_at is null and greatest(created_at, ready_at, unready_at, taken_at, ending_at) > now() + interval '5 minutes'
    returning name
), given as (
    update orca.runtimes set assigned_at = now()
    where ended_at is null and assigned_at > now() + interval '5 minutes' returning pod
), waiting as (
    update orca.kube_objects set next_try_at = now()
    where scope = 'runtimes' and uid is null and next_try_at > now() + interval '5 minutes' returning name
), ended as (
    update orca.runtime_pods set ended_at = now() where ended_at > now() + interval '5 minutes' returning name
), over as (
    update orca.runtimes set ended_at = now() where ended_at > now() + interval '5 minutes' returning pod
)
select 'Pod ' || name as row from pods union all select 'runtime of Pod ' || pod from given
union all select 'object ' || name from waiting union all select 'ended Pod ' || name from ended
union all select 'ended runtime of Pod ' || pod from over
order by 1

-- name: queued_ahead
-- Queued runs that say that they were queued later than now; they count as due.
select count(*)::int as runs, min(id) as first from orca.runs
where state = 'queued' and queued_at > now() + interval '1 minute'
