-- Named statements of the passes' record; %(...)s are parameters.

-- name: begin_pass
insert into orca.passes (scope, decided_at, version, about, decisions, record, frame)
values (%(scope)s, %(decided_at)s, %(version)s, %(about)s, %(decisions)s, %(record)s, %(frame)s)
returning id

-- name: hold_frame
-- Whether a frame is still there; then it stays until this transaction's end.
select id from orca.pass_frames where id = %(frame)s for key share

-- name: begin_frame
insert into orca.pass_frames (scope, record) values (%(scope)s, %(record)s) returning id

-- name: forget_frames
-- Those that nothing is told against any more; the newest is the one that the next passes will be.
delete from orca.pass_frames f where scope = %(scope)s
    and id < (select max(id) from orca.pass_frames where scope = %(scope)s)
    and not exists (select from orca.passes p where p.frame = f.id)

-- name: bound_passes
-- The newest `passes` of a scope stay, as far as they are young enough.
delete from orca.passes where scope = %(scope)s and (
    id <= (select id from orca.passes where scope = %(scope)s order by id desc offset %(passes)s limit 1)
    or decided_at < now() - make_interval(secs => %(seconds)s)
)

-- name: end_pass
update orca.passes set ended_at = now(), outcome = %(outcome)s, message = %(message)s, changed = %(changed)s,
    about = about || %(about)s::text[], decisions = decisions || %(decisions)s::jsonb
where id = %(id)s

-- name: forget_pass
delete from orca.passes where id = %(id)s

-- name: last_decisions
select decisions, outcome, message from orca.passes where scope = %(scope)s order by id desc limit 1

-- name: machines_tried
-- The machines that a pass tried to make, and what each try came to.
select name, pool, type, location, confirmed_at is not null as made, reason from orca.pool_machines
where created_at >= %(since)s order by pool, number

-- name: pods_born
select name, pool from orca.runtime_pods where created_at >= %(since)s and pool is not null order by created_at, name

-- name: newest_passes
select id, scope, decided_at, ended_at, outcome, message, changed, version, decisions,
    exists (select from orca.passes n where n.scope = p.scope and n.id > p.id) as is_past
from orca.passes p order by id desc limit %(limit)s

-- name: last_passes
select distinct on (scope) id, scope, decided_at, decisions from orca.passes order by scope, id desc

-- name: passes_about
select id, scope, decided_at, ended_at, outcome, message, changed, version, decisions,
    exists (select from orca.passes n where n.scope = p.scope and n.id > p.id) as is_past
from orca.passes p where about && %(names)s::text[] order by id desc limit %(limit)s

-- name: pass
select p.id, p.scope, decided_at, ended_at, outcome, message, changed, version, decisions, p.record, f.record as frame,
    exists (select from orca.passes n where n.scope = p.scope and n.id > p.id) as is_past
from orca.passes p left join orca.pass_frames f on f.id = p.frame where p.id = %(id)s

-- name: run_for_people
select r.id as run, r.pipeline, r.state, r.start, r.worker, r.reason, r.queued_at, r.started_at, r.ended_at, r.fill,
    p.placement, p.paused, p.max_runs, p.image, p.workers, (
        select count(*)::int from orca.runs o where o.pipeline = r.pipeline and o.state = 'running' and not o.fill
    ) as running
from orca.runs r join orca.pipelines p on p.name = r.pipeline where r.id = %(run)s

-- name: pool_for_people
select s.pool, s.message, s.skipped, s.demand, s.last_attempt, s.tried_at, s.next_try_at
from orca.pool_status s where s.pool = %(pool)s

-- name: machine_for_people
select name, pool, provider, type, location, created_at, confirmed_at, revoked_at, removal_reason, drain_at, ended_at, reason
from orca.pool_machines where name = %(name)s

-- name: runtime_pod_for_people
select d.name, d.pool, d.environment, d.created_at, d.ready_at, d.problem, d.taken_at, d.ending_reason, d.ending_detail,
    d.ended_at, d.reason, r.id as runtime, r.expires_at
from orca.runtime_pods d left join orca.runtimes r on r.pod = d.name
where d.name = %(name)s or r.id::text = %(name)s
