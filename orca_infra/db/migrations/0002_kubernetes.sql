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

create table orca.runtime_pods (
    name            text primary key,
    namespace       text not null,
    pool            text,                            -- null: a cold start, a Pod of its own
    pool_namespace  text,
    environment     text not null,
    requests        jsonb not null default '{}',
    placement       jsonb not null default '{}',     -- node selection, compared when a launch asks for one
    burning_rate    double precision not null default 0,
    cull_seconds    double precision,
    created_at      timestamptz not null default now(),
    uid             text,
    ready_at        timestamptz,
    problem         text not null default '',        -- why it is not Ready
    ending_reason   text,
    ended_at        timestamptz,
    reason          text,
    check ((ended_at is null) = (reason is null))
);
create index runtime_pods_warm on orca.runtime_pods (environment, ready_at)
    where ended_at is null and ending_reason is null;

create table orca.runtimes (
    id                uuid primary key default gen_random_uuid(),
    pod               text not null unique references orca.runtime_pods,
    user_name         text not null,
    environment       text not null,
    warm              boolean not null,
    idempotency_key   text unique,
    burning_rate      double precision not null default 0,
    assigned_at       timestamptz not null default now(),
    expires_at        timestamptz,
    secret_made_at    timestamptz,
    ended_at          timestamptz,
    reason            text,
    credits           double precision
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
