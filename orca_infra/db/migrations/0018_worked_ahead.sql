-- A run that ended while the clock was ahead, or whose end somebody wrote far in the future, keeps no idle machine for good.

create or replace function orca.revoke_machine(
    p_name text, p_reason text, p_only_idle boolean, p_unless_worked_since timestamptz default null
) returns boolean language plpgsql as $$
declare
    run record;
begin
    perform from orca.pool_machines m where m.name = p_name and m.ended_at is null for update;
    if not found then
        return false;
    end if;
    if p_only_idle and exists (select from orca.runs r where r.worker = p_name and r.state = 'running') then
        return false;
    end if;
    if exists (
        select from orca.runs r
        where r.worker = p_name and r.ended_at > p_unless_worked_since and r.ended_at <= now() + interval '5 minutes'
    ) then
        return false;
    end if;
    update orca.pool_machines m
    set revoked_at = coalesce(m.revoked_at, now()), removal_reason = coalesce(m.removal_reason, p_reason)
    where m.name = p_name;
    for run in
        select r.id, r.start, p.max_starts from orca.runs r join orca.pipelines p on p.name = r.pipeline
        where r.worker = p_name and r.state = 'running' for update of r
    loop
        perform orca.move_run(run.id, run.start, 'running', case when run.start >= run.max_starts then 'failed' else 'queued' end,
            'orca-infra', p_name, p_reason);
    end loop;
    return true;
end $$;
