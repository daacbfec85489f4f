-- Named statements of the engine's ledger; %(...)s are parameters.

-- name: begin_operation
insert into orca.engine_operations (stack, kind, targets, host, boot_id, deadline_seconds)
values (%(stack)s, %(kind)s, %(targets)s, %(host)s, %(boot_id)s, %(deadline_seconds)s)
returning id

-- name: operation_started
update orca.engine_operations set pid = %(pid)s, process_started = %(process_started)s where id = %(id)s

-- name: end_operation
update orca.engine_operations set ended_at = now(), outcome = %(outcome)s, message = %(message)s where id = %(id)s
returning stack, kind, outcome, extract(epoch from ended_at - started_at)::float8 as seconds

-- name: unsettled_stacks
-- Stacks whose last operations have no known end, or whose state the engine refused.
select distinct stack from orca.engine_operations
where ended_at is null or outcome in ('OutcomeUnknown', 'StateBroken') order by stack

-- name: settle_stack
update orca.engine_operations
set ended_at = coalesce(ended_at, now()), outcome = 'Settled'
where stack = %(stack)s and (ended_at is null or outcome in ('OutcomeUnknown', 'StateBroken'))

-- name: operations_of
-- The newest operations of a stack, as proof of who a lock's holder was.
select pid, process_started, host, boot_id, ended_at is not null as ended, outcome, started_at, deadline_seconds, now() as now
from orca.engine_operations where stack = %(stack)s order by id desc limit 50

-- name: state_lock
select pg_advisory_xact_lock(hashtextextended('orca.state', 0))

-- name: state_identity
insert into orca.state_identity (stack, place) values (%(stack)s, %(place)s) on conflict do nothing

-- name: state_known
select stack, place, first_seen from orca.state_identity

-- name: own
insert into orca.owned (stack, urn, type, name, id, uid)
values (%(stack)s, %(urn)s, %(type)s, %(name)s, %(id)s, %(uid)s)
on conflict (stack, urn) do update set id = excluded.id, uid = excluded.uid, at = now()

-- name: disown
delete from orca.owned where stack = %(stack)s and urn = %(urn)s

-- name: disown_all
delete from orca.owned where stack = %(stack)s

-- name: machine_stacks
-- Stacks that live long and were operated on lately; cohorts are dropped with their history.
select distinct stack from orca.engine_operations where stack like '%%.machines.%%' order by stack

-- name: prune_operations
delete from orca.engine_operations where ended_at < now() - make_interval(secs => %(kept_seconds)s) and outcome not in ('OutcomeUnknown', 'StateBroken')
