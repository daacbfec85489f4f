-- What the loop makes on Kubernetes: the cohorts that declare it, its objects as they were rendered, run clusters, and the
-- warm Pods of the runtime pools with what they are taken for.

-- The cluster that this family belongs to: kube-system's uid. Another one is refused.
create table orca.cluster_identity (
    single     boolean primary key default true check (single),
    uid        text not null,
    server     text not null,
    first_seen timestamptz not null default now()
);

-- A cohort is a stack that is upped exactly once, with all that one pass makes.
create sequence orca.cohort_numbers;
create table orca.cohorts (
    stack     text primary key,
    number    bigint not null,
    scope     text not null check (scope in ('runs', 'runtimes')),
    begun_at  timestamptz not null default now(),
    ended_at  timestamptz,
    outcome   text
);

create table orca.run_clusters (
    run            bigint not null,
    start          integer not null,
    pipeline       text not null,
    cpu_millis     integer not null,
    fill           boolean not null default false,
    created_at     timestamptz not null default now(),
    ending_reason  text,                             -- why it ends; what is left is deleted first, then the run is moved
    ending_detail  text not null default '',
    log_saved_at   timestamptz,
    ended_at       timestamptz,
    reason         text,
    primary key (run, start),
    check ((ended_at is null) = (reason is null))
);
create index run_clusters_live on orca.run_clusters (created_at) where ended_at is null;

-- Every runtime Pod's number, of all pools and cold starts: never used twice.
create sequence orca.runtime_numbers;

-- A runtime Pod from its birth to its end. It waits in its pool until `taken_at`, which a launch writes.
create table orca.runtime_pods (
    name            text primary key,
    namespace       text not null,
    pool            text,                            -- null: a cold start, a Pod of its own
    environment     text not null,
    requests        jsonb not null default '{}',     -- in thousandths: {"cpu": 500, "memory": 536870912000}
    size            double precision[] not null default '{0,0,0}',  -- other resources, CPU, memory: which Pod is smaller
    placement       jsonb not null default '{}',     -- node selection, compared when a launch asks for one
    burning_rate    double precision not null default 0,
    cull_seconds    double precision,
    created_at      timestamptz not null default now(),
    uid             text,                            -- of the Pod, once it was seen
    ready_at        timestamptz,                     -- null: not Ready, or going away
    unready_at      timestamptz,                     -- since when it is Ready no more
    address         text,
    problem         text not null default '',        -- why it is not Ready
    taken_at        timestamptz,
    ending_reason   text,                            -- why it ends; what is left is deleted first, then the row ends
    ending_detail   text not null default '',
    ending_at       timestamptz,
    ended_at        timestamptz,
    reason          text,
    check ((ended_at is null) = (reason is null)),
    check ((ending_at is null) = (ending_reason is null))
);
create index runtime_pods_live on orca.runtime_pods (created_at) where ended_at is null;
create index runtime_pods_warm on orca.runtime_pods (environment, namespace)
    where ready_at is not null and taken_at is null and ending_reason is null and ended_at is null;

-- What a Pod is taken for. The Secret's values are nowhere here.
create table orca.runtimes (
    id                uuid primary key default gen_random_uuid(),
    pod               text not null unique references orca.runtime_pods,
    user_name         text not null,
    environment       text not null,
    warm              boolean not null,
    idempotency_key   text,                          -- a user's own: nobody gets another's runtime by a key
    burning_rate      double precision not null default 0,
    assigned_at       timestamptz not null default now(),
    expires_at        timestamptz,
    secret_made_at    timestamptz,
    ended_at          timestamptz,
    reason            text,
    credits           double precision,
    unique (user_name, idempotency_key),
    check ((ended_at is null) = (reason is null))
);
create index runtimes_live on orca.runtimes (user_name) where ended_at is null;

-- Every object that a cohort declares, from here and nowhere else. A row goes once its object was seen gone.
create table orca.kube_objects (
    scope        text not null check (scope in ('runs', 'runtimes')),
    namespace    text not null,
    kind         text not null,
    name         text not null,
    position     integer not null default 0,         -- the Job of a run before what it owns
    run          bigint,
    start        integer,
    pod          text references orca.runtime_pods,
    rendered     jsonb not null,
    cohort       text references orca.cohorts (stack),
    uid          text,
    confirmed_at timestamptz,
    refused      text not null default '',
    tries        integer not null default 0,
    next_try_at  timestamptz,
    primary key (namespace, kind, name),
    foreign key (run, start) references orca.run_clusters (run, start),
    check ((run is null) <> (pod is null))
);
create index kube_objects_of_run on orca.kube_objects (run, start);
create index kube_objects_open on orca.kube_objects (scope) where uid is null;
create index kube_objects_cohort on orca.kube_objects (cohort);
