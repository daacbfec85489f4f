-- Named statements of the run clusters; %(...)s are parameters.

-- name: pipelines_with_clusters
select name, image, workers from orca.pipelines
where image is not null and coalesce(placement, '') not like 'worker:%%'

-- name: queued_runs
-- Runs that wait for a cluster, oldest first: not placed on a worker pool, registered with an image, not paused. Those that
-- could be admitted come first, so that what is held, however much it is, hides none of them; of what its pipeline holds
-- (max_runs, or one of `barred`) only the first is there, to say so. `asked` is there in any case, as long as it is queued.
-- None while the whole family is paused (loop/drain.py). What is ranked is as little as possible of each run, so that an
-- index has all of it, and only what is chosen is looked into.
with running as (
    select r.pipeline, count(*) as runs from orca.runs r where r.state = 'running' and not r.fill group by r.pipeline
), open as (
    select p.*, p.name = any(%(barred)s::text[]) as barred,
        case when p.max_runs is null then %(limit)s else greatest(p.max_runs - coalesce(n.runs, 0), 0) end as plain_most
    from orca.pipelines p left join running n on n.pipeline = p.name
    where not p.paused and p.image is not null and coalesce(p.placement, '') not like 'worker:%%'
        and not exists (select from orca.pool_pauses where pool = '*')
), marked as (
    -- Held by itself: an earlier start of it lives, or it cannot be counted further.
    select r.id, r.start, r.pipeline, r.fill, r.queued_at,
        r.start >= %(starts_max)s or r.id in (select e.run from orca.run_clusters e where e.ended_at is null) as stuck
    from orca.runs r where r.state = 'queued'
), ranked as (
    select m.*, count(*) filter (where not m.stuck)
        over (partition by m.pipeline, m.fill order by m.queued_at, m.id rows unbounded preceding) as place
    from marked m
), judged as (
    select r.*, p.image, p.workers, p.allow_new_code, p.max_runs,
        r.stuck or p.barred or (not r.fill and r.place > p.plain_most) as held,
        case when p.barred then 1 when r.fill then %(limit)s else p.plain_most + 1 end as place_most
    from ranked r join open p on p.name = r.pipeline
), chosen as (
    select r.id as run, r.start, r.pipeline, r.image, r.workers, r.allow_new_code, r.fill, r.max_runs, r.queued_at
    from judged r where r.place <= least(r.place_most, %(limit)s) or r.id = %(asked)s
    order by r.id is not distinct from %(asked)s desc, r.held, r.queued_at, r.id limit %(limit)s
)
select c.*, (select max(e.start) from orca.run_clusters e where e.run = c.run and e.ended_at is null) as earlier
from chosen c order by c.queued_at, c.run

-- name: running_runs
select r.pipeline, count(*)::int as running
from orca.runs r where r.state = 'running' and not r.fill group by r.pipeline

-- name: live_clusters
-- Starts that have not ended. A run or a pipeline that somebody deleted is not running any more: its cluster goes too.
select c.run, c.start, c.pipeline, c.cpu_millis, c.created_at, coalesce(r.state, 'deleted') as run_state,
    coalesce(r.start, 0) as run_start, p.max_starts,
    max(o.uid) filter (where o.kind = 'Job') as job_uid,
    min(o.declared_at) filter (where o.kind = 'Job' and o.uid is null) as job_declared_at,
    max(o.uid) filter (where o.kind = 'Pod' and o.name like '%%-head') as head_uid,
    count(*) filter (where o.run is not null and o.uid is null)::int as open_objects,
    coalesce(max(o.refused), '') as refused, c.waiting, c.ending_reason, c.ending_detail,
    c.log_saved_at is not null as logs_saved
from orca.run_clusters c
left join orca.runs r on r.id = c.run
left join orca.pipelines p on p.name = c.pipeline
left join orca.kube_objects o on o.run = c.run and o.start = c.start
where c.ended_at is null
group by c.run, c.start, r.state, r.start, p.max_starts
order by c.created_at, c.run

-- name: live_starts
select run, start from orca.run_clusters where ended_at is null

-- name: known_objects
select kind, namespace, name, uid, run, start from orca.kube_objects where scope = 'runs'

-- name: admit
-- Both or nothing: the run is running at its next start, and its cluster is wanted. Not while an earlier start's lives: never
-- two drivers at a time.
select orca.move_run(%(run)s, %(start)s, 'queued', 'running', 'orca-infra', null, null)
where not exists (select from orca.run_clusters c where c.run = %(run)s and c.ended_at is null)

-- name: record_cluster
insert into orca.run_clusters (run, start, pipeline, cpu_millis, fill)
values (%(run)s, %(start)s, %(pipeline)s, %(cpu_millis)s, %(fill)s)

-- name: record_object
insert into orca.kube_objects (scope, namespace, kind, name, position, run, start, rendered)
values ('runs', %(namespace)s, %(kind)s, %(name)s, %(position)s, %(run)s, %(start)s, %(rendered)s)

-- name: labels_of
select rendered #> '{metadata,labels}' from orca.kube_objects
where namespace = %(namespace)s and kind = %(kind)s and name = %(name)s

-- name: say_waiting
update orca.run_clusters set waiting = %(waiting)s where run = %(run)s and start = %(start)s

-- name: begin_ending
update orca.run_clusters set ending_reason = %(reason)s, ending_detail = %(detail)s
where run = %(run)s and start = %(start)s and ended_at is null and ending_reason is null

-- name: save_logs
update orca.run_clusters set log_saved_at = now() where run = %(run)s and start = %(start)s

-- name: move
-- Compare-and-set: a run that has ended meanwhile, or runs at another start, stays as it is.
select orca.move_run(%(run)s, %(start)s, 'running', %(to_state)s, 'orca-infra', null, %(reason)s)

-- name: end_cluster
update orca.run_clusters set ended_at = now(), reason = %(reason)s
where run = %(run)s and start = %(start)s and ended_at is null

-- name: forget_objects
delete from orca.kube_objects where run = %(run)s and start = %(start)s

-- name: prune_clusters
delete from orca.run_clusters where ended_at < now() - make_interval(secs => %(kept_seconds)s)

-- name: clusters_for_people
select c.run, c.start, c.pipeline, c.created_at, c.ending_reason, c.ending_detail, c.waiting,
    coalesce(r.state, 'deleted') as run_state, count(o.*)::int as objects, count(o.uid)::int as made,
    coalesce(max(o.refused), '') as refused
from orca.run_clusters c left join orca.runs r on r.id = c.run
left join orca.kube_objects o on o.run = c.run and o.start = c.start
where c.ended_at is null group by c.run, c.start, r.state order by c.run

-- name: queued_without_cluster
-- Queued runs that admission does not look at, with why; `asked` is among them in any case, if it is such a run.
with family as (
    select exists (select from orca.pool_pauses where pool = '*') as paused
)
select r.id as run, r.pipeline, r.queued_at,
    case when p.paused then 'its pipeline is paused' when p.image is null then 'its pipeline has no image'
        else 'everything is paused: no run is started until `orca-infra resume`' end as waiting
from orca.runs r join orca.pipelines p on p.name = r.pipeline, family f
where r.state = 'queued' and coalesce(p.placement, '') not like 'worker:%%' and (p.paused or p.image is null or f.paused)
order by r.id is not distinct from %(asked)s desc, r.queued_at, r.id limit %(limit)s

-- name: queued_count
-- However many of them admission, and people, look at.
select count(*) from orca.runs r join orca.pipelines p on p.name = r.pipeline
where r.state = 'queued' and coalesce(p.placement, '') not like 'worker:%%'

-- name: ended_clusters
select run, start, pipeline, created_at, ended_at, reason, ending_detail from orca.run_clusters
where ended_at is not null order by ended_at desc limit %(limit)s

-- name: run
select id, pipeline, state, start, reason, queued_at, started_at, ended_at from orca.runs where id = %(run)s

-- name: starts_of_run
select start, created_at, ended_at, reason, ending_reason, ending_detail, waiting from orca.run_clusters
where run = %(run)s order by start

-- name: objects_of_run
select kind, namespace, name, uid, cohort, confirmed_at, refused from orca.kube_objects
where run = %(run)s order by start, position
