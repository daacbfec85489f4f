-- Named statements of the lead; %(...)s are parameters.

-- name: wait_little
-- For transactions of an earlier leader, which are short unless its host hangs.
select set_config('lock_timeout', '5s', false)

-- name: server_process
select pg_backend_pid()

-- name: acquire
-- Not when another server process answers than before: the lock would then be left with a process that is not ours.
select pg_backend_pid() = %(pid)s, case when pg_backend_pid() = %(pid)s then pg_try_advisory_lock(hashtextextended('orca.leader', 0)) end

-- name: release
-- A server process that is left frees its locks only once it notices.
select pg_advisory_unlock(hashtextextended('orca.leader', 0))

-- name: begin_lead
select orca.begin_lead(%(holder)s)

-- name: leads
select orca.leads(%(epoch)s, %(pid)s)

-- name: leads_here
select pg_backend_pid() = %(pid)s, orca.leads(%(epoch)s, %(pid)s)

-- name: holder
select a.pid, coalesce(host(a.client_addr), 'this host'), to_char(a.backend_start, 'YYYY-MM-DD HH24:MI:SS')
from pg_locks l join pg_stat_activity a on a.pid = l.pid
where l.locktype = 'advisory' and l.granted and l.objsubid = 1
  and ((l.classid::bigint << 32) | l.objid::bigint) = hashtextextended('orca.leader', 0)
  and l.database = (select oid from pg_database where datname = current_database())

-- name: oust
select count(pg_terminate_backend(l.pid))
from pg_locks l
where l.locktype = 'advisory' and l.granted and l.objsubid = 1
  and ((l.classid::bigint << 32) | l.objid::bigint) = hashtextextended('orca.leader', 0)
  and l.database = (select oid from pg_database where datname = current_database())

-- name: strays_held
-- Why no stray may be deleted; empty when an operator need not be asked.
select case when strays_held_since is null then '' else strays_held_why end from orca.lead

-- name: release_strays
update orca.lead set strays_held_since = null, strays_held_why = '' where strays_held_since is not null
