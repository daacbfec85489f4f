-- What the answer to a launch says beside the claim. A function, as the others of a launch: its plan is made once a connection.
create function orca.runtime_cost(p_id uuid)
returns table (pool text, burning_rate double precision, assigned_at timestamptz, credits double precision)
stable rows 1 language plpgsql as $$
begin
    return query
    select p.pool, r.burning_rate, r.assigned_at, coalesce(r.credits, r.burning_rate
        * orca.runtime_seconds(r.assigned_at, p.ready_at, coalesce(p.ending_at, now()), r.expires_at))
    from orca.runtimes r join orca.runtime_pods p on p.name = r.pod where r.id = p_id;
end $$;
