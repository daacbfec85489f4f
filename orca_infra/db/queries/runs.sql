-- Named statements of the run clusters; %(...)s are parameters.

-- name: queued_runs
-- Runs that wait for a cluster, oldest first: not placed on a worker pool, registered with an image, not paused. Of what its
-- pipeline's max_runs holds, and of what is larger than the whole budget, only the first of each pipeline: it is there to say
-- so, and however many there are they hide no other. None while the whole family is paused (loop/drain.py). What is ranked is
-- as little as possible of each run, so that an index has all of it, and only what is chosen is looked into.
with running as (
    select r.pipeline, count(*) as runs from orca.runs r where r.state = 'running' and not r.fill group by r.pipeline
), open as (
    select p.*,
        %(driver)s::bigint + case when p.workers > 0 then %(head)s::bigint + p.workers * %(worker)s::bigint else 0 end
            > %(budget)s::numeric as too_large,
        greatest(p.max_runs - coalesce(n.runs, 0), 0) + 1 as plain_most
    from orca.pipelines p left join running n on n.pipeline = p.name
    where not p.paused and p.image is not null and coalesce(p.placement, '') not like 'worker:%%'
        and not exists (select from orca.pool_pauses where pool = '*')
), ranked as (
    select r.id, r.start, r.pipeline, r.fill, r.queued_at,
        row_number() over (partition by r.pipeline, r.fill order by r.queued_at, r.id) as place
    from orca.runs r where r.state = 'queued'
), chosen as (
    select r.id as run, r.start, r.pipeline, p.image, p.workers, p.allow_new_code, r.fill, p.max_runs, r.queued_at
    from ranked r join open p on p.name = r.pipeline
    where r.place <= %(limit)s
        and r.place <= case when p.too_large then 1 when r.fill or p.max_runs is null then %(limit)s else p.plain_most end
    order by r.queued_at, r.id limit %(limit)s
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
-- Queued runs that admission does not look at, with why.
select r.id as run, r.pipeline, r.queued_at,
    case when p.paused then 'its pipeline is paused' else 'its pipeline has no image' end as waiting
from orca.runs r join orca.pipelines p on p.name = r.pipeline
where r.state = 'queued' and coalesce(p.placement, '') not like 'worker:%%' and (p.paused or p.image is null)
order by r.queued_at, r.id limit %(limit)s

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
