-- Named statements of what is measured; %(...)s are parameters.

-- name: started_on_workers
-- Runs that workers run now and took for the first time since then, with how long each was queued.
select extract(epoch from r.started_at - r.queued_at)::float8 as queued_seconds
from orca.runs r
where r.state = 'running' and r.worker is not null and r.start = 1 and r.started_at > %(since)s and r.started_at <= now()

-- name: queued_seconds
-- How long runs that were admitted in this transaction, for the first time, were queued.
select extract(epoch from now() - r.queued_at)::float8 as queued_seconds
from orca.runs r where r.id = any(%(runs)s) and r.start = 1
