-- Whose cloud the machines are in, and whether a machine was made as a spot one.

-- The account (on Google Cloud: the project) that this family's machines are in. Another one is refused.
create table orca.cloud_identity (
    provider    text primary key,
    account     text not null,
    first_seen  timestamptz not null default now()
);

alter table orca.pool_machines add column spot boolean not null default false;
