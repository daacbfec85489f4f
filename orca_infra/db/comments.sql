-- What each table, column and function of this program means: read in psql with \d+, and made into docs/reference/tables.md.
-- Run after the migrations, again whenever one was applied. orca's own tables are documented in that page by hand.

comment on table orca.schema_versions is 'One row for each migration that was applied. Kept for ever.';
comment on column orca.schema_versions.version is 'The migration''s number.';
comment on column orca.schema_versions.name is 'Its file.';
comment on column orca.schema_versions.applied_at is 'When it was applied.';

comment on table orca.stack_identity is 'The stack family that this database serves; one row. Kept for ever.';
comment on column orca.stack_identity.single is 'Always true: there is one row.';
comment on column orca.stack_identity.id is 'The id that labels everything that the family makes; made once, at random.';
comment on column orca.stack_identity.family is 'The family''s name, ORCA_STACK.';
comment on column orca.stack_identity.made_at is 'When the id was made.';

comment on table orca.lead is 'Who led last, and in which epoch; one row. Kept for ever.';
comment on column orca.lead.single is 'Always true: there is one row.';
comment on column orca.lead.epoch is 'Rises with each lead. Writes of an earlier one are refused.';
comment on column orca.lead.holder is 'The process that leads or led last.';
comment on column orca.lead.since is 'When this lead began.';
comment on column orca.lead.system_identifier is 'The database server''s own, as of this lead; a restored dump has another.';
comment on column orca.lead.timeline is 'The database server''s, as of this lead; a failover or a recovery begins another.';
comment on column orca.lead.strays_held_since is 'Since when no stray is deleted, because rows may have been lost; null when none is held for that.';
comment on column orca.lead.strays_held_why is 'What the loop saw of it. `orca-infra strays delete` ends it.';

comment on table orca.run_transitions is 'One row for each change of a run''s state, and who may write it. Kept for ever.';
comment on column orca.run_transitions.from_state is 'The state before.';
comment on column orca.run_transitions.to_state is 'The state after.';
comment on column orca.run_transitions.writer is 'scheduler, worker, driver or orca-infra.';
comment on column orca.run_transitions.sense is 'When it happens.';

comment on table orca.pool_machines is 'One row for each machine, or each try to make one. Kept ORCA_ENDED_ROW_SECONDS after its end.';
comment on column orca.pool_machines.name is 'orca-<pool>-<number>.';
comment on column orca.pool_machines.pool is 'Its pool.';
comment on column orca.pool_machines.number is 'Never used twice in a pool.';
comment on column orca.pool_machines.provider is 'The provider that was asked, such as gcp or local.';
comment on column orca.pool_machines.type is 'The machine type that was asked for.';
comment on column orca.pool_machines.spot is 'Whether its provider may take it away at any time.';
comment on column orca.pool_machines.location is 'Where it was asked for.';
comment on column orca.pool_machines.rendered is 'What is declared to the engine; written once, at birth, with a placeholder for the token.';
comment on column orca.pool_machines.token_hash is 'SHA-256 of the worker''s token; the token is stored in no row.';
comment on column orca.pool_machines.created_at is 'When the row was written, which is before the machine was asked for.';
comment on column orca.pool_machines.uid is 'The provider''s id of this very machine.';
comment on column orca.pool_machines.confirmed_at is 'When its uid was learned.';
comment on column orca.pool_machines.drain_at is 'Since when it takes no more runs and goes once it is idle.';
comment on column orca.pool_machines.drain_now is 'Whether it goes at once, whatever runs there.';
comment on column orca.pool_machines.revoked_at is 'Since when its worker can take and end nothing.';
comment on column orca.pool_machines.removal_reason is 'Why it goes.';
comment on column orca.pool_machines.ended_at is 'When nothing of it was left.';
comment on column orca.pool_machines.reason is 'Idle, PoolGone, Drained, BootTimeout, Lost, Stopped, Preempted, Vanished, Interrupted, NoCapacity or Failed.';

comment on table orca.pool_status is 'One row for each pool: what the last pass found and did. Kept for ever, since a machine''s number is never used twice.';
comment on column orca.pool_status.pool is 'The pool.';
comment on column orca.pool_status.last_number is 'The highest number ever used.';
comment on column orca.pool_status.trying_type is 'The type that the search is on; null: the first, not begun.';
comment on column orca.pool_status.trying_since is 'Since when it is on that type.';
comment on column orca.pool_status.tried_at is 'When the last try was, whatever it came to.';
comment on column orca.pool_status.last_attempt is 'What the last try came to, in words.';
comment on column orca.pool_status.demand is 'Due runs that no worker has room for.';
comment on column orca.pool_status.message is 'Why something, or nothing, is made now.';
comment on column orca.pool_status.next_try_at is 'When the next try may come.';
comment on column orca.pool_status.observed_at is 'When the loop wrote this.';
comment on column orca.pool_status.machines is 'How many machines are making, booting, idle, busy, draining or removing.';
comment on column orca.pool_status.skipped is 'Types that are left out, with the reason.';
comment on column orca.pool_status.paused_since is 'Since when the pool is paused.';

comment on table orca.pool_pauses is 'One row for each pool that a person paused. Kept until it is resumed.';
comment on column orca.pool_pauses.pool is 'The pool; the empty name is every pool.';
comment on column orca.pool_pauses.since is 'Since when.';

comment on table orca.pool_offers is 'One row for each type in a location that could not be had. Kept until it could be had.';
comment on column orca.pool_offers.pool is 'The pool that asked.';
comment on column orca.pool_offers.location is 'Where.';
comment on column orca.pool_offers.type is 'Which machine type.';
comment on column orca.pool_offers.spot is 'Whether as a spot machine.';
comment on column orca.pool_offers.class is 'NoCapacity, QuotaExceeded, Refused, AuthFailed or Transient.';
comment on column orca.pool_offers.message is 'The provider''s words.';
comment on column orca.pool_offers.since is 'When the first refusal of this class in a row was.';
comment on column orca.pool_offers.last_at is 'When the last was.';
comment on column orca.pool_offers.times is 'How many there were in a row.';

comment on table orca.owned is 'One row for each resource in the state of one of the family''s stacks. Kept until it is gone from the state.';
comment on column orca.owned.stack is 'The stack that owns it.';
comment on column orca.owned.urn is 'Pulumi''s name of it.';
comment on column orca.owned.type is 'Its Pulumi type.';
comment on column orca.owned.name is 'Its name in the program.';
comment on column orca.owned.id is 'Its id in the state.';
comment on column orca.owned.uid is 'The provider''s id of this very object.';
comment on column orca.owned.at is 'When this was written.';

comment on table orca.engine_operations is 'One row for each call of the engine, written before it begins. Kept ORCA_ENDED_ROW_SECONDS after its end.';
comment on column orca.engine_operations.id is 'Its number.';
comment on column orca.engine_operations.stack is 'On which stack.';
comment on column orca.engine_operations.kind is 'up, destroy or refresh.';
comment on column orca.engine_operations.targets is 'The resources that it is about; empty: the whole stack.';
comment on column orca.engine_operations.host is 'The host that its process is on.';
comment on column orca.engine_operations.boot_id is 'Which boot of that host.';
comment on column orca.engine_operations.pid is 'Its process.';
comment on column orca.engine_operations.process_started is 'Seconds from the boot to the process''s start; with pid and boot it names one process.';
comment on column orca.engine_operations.deadline_seconds is 'How long after its start it is interrupted; null in rows of older versions.';
comment on column orca.engine_operations.started_at is 'When it began.';
comment on column orca.engine_operations.ended_at is 'When it ended; null: it is under way, or its end is not known.';
comment on column orca.engine_operations.outcome is 'Done, Settled, OutcomeUnknown, or the kind of its error.';
comment on column orca.engine_operations.message is 'The error''s words.';

comment on table orca.attention is 'One row for each matter that an operator has to look at. Kept until it is no longer so.';
comment on column orca.attention.topic is 'What it is about.';
comment on column orca.attention.message is 'What is wrong, and what to do.';
comment on column orca.attention.since is 'Since when.';

comment on table orca.hearing is 'Since when workers could be heard; one row. Kept for ever.';
comment on column orca.hearing.single is 'Always true: there is one row.';
comment on column orca.hearing.since is 'Since when they could be heard without a gap.';
comment on column orca.hearing.read_at is 'When heartbeats were read last.';

comment on table orca.cloud_identity is 'The account of a provider that this family''s machines are in; one row for each provider. Kept until it is deleted by hand.';
comment on column orca.cloud_identity.provider is 'The provider, such as gcp.';
comment on column orca.cloud_identity.account is 'On Google Cloud: the project''s id.';
comment on column orca.cloud_identity.first_seen is 'When the base was first made there.';
comment on table orca.cluster_identity is 'The Kubernetes cluster that this family belongs to; one row. Kept for ever.';
comment on column orca.cluster_identity.single is 'Always true: there is one row.';
comment on column orca.cluster_identity.uid is 'The uid of its namespace kube-system.';
comment on column orca.cluster_identity.server is 'Its address when it was first seen.';
comment on column orca.cluster_identity.first_seen is 'When that was.';

comment on table orca.state_identity is 'That the engine''s state is there; one row. Kept until it is deleted by hand, to have a lost state begun anew.';
comment on column orca.state_identity.single is 'Always true: there is one row.';
comment on column orca.state_identity.stack is 'The stack of the base, which the state holds from then on.';
comment on column orca.state_identity.place is 'Where the state was then: its backend, without secrets.';
comment on column orca.state_identity.first_seen is 'When a loop first started on it.';

comment on table orca.cohorts is 'One row for each stack that is upped once, with what one pass makes. Kept until nothing of it is left.';
comment on column orca.cohorts.stack is 'The stack''s name.';
comment on column orca.cohorts.number is 'Its number in the family.';
comment on column orca.cohorts.scope is 'runs or runtimes.';
comment on column orca.cohorts.begun_at is 'When its up began.';
comment on column orca.cohorts.ended_at is 'When its up ended.';
comment on column orca.cohorts.outcome is 'What its up came to.';

comment on table orca.kube_objects is 'One row for each object on Kubernetes that is wanted. Kept until it was seen gone.';
comment on column orca.kube_objects.scope is 'runs or runtimes.';
comment on column orca.kube_objects.namespace is 'Its namespace.';
comment on column orca.kube_objects.kind is 'Its kind.';
comment on column orca.kube_objects.name is 'Its name.';
comment on column orca.kube_objects.position is 'Its place in the order of making: a run''s Job comes before what it owns.';
comment on column orca.kube_objects.run is 'The run that it is made for.';
comment on column orca.kube_objects.start is 'Which start of that run.';
comment on column orca.kube_objects.pod is 'The runtime Pod that it belongs to.';
comment on column orca.kube_objects.rendered is 'Its manifest as it was born; declared from here and nowhere else.';
comment on column orca.kube_objects.cohort is 'The cohort that declared it last.';
comment on column orca.kube_objects.declared_at is 'Since when an operation of unknown end may have made it.';
comment on column orca.kube_objects.uid is 'Its uid, once it was confirmed.';
comment on column orca.kube_objects.confirmed_at is 'When that was.';
comment on column orca.kube_objects.refused is 'The API server''s words when it refused it last.';
comment on column orca.kube_objects.tries is 'How often it was refused.';
comment on column orca.kube_objects.next_try_at is 'When it is tried again.';

comment on table orca.run_clusters is 'One row for each start of a run that has or had a cluster. Kept ORCA_ENDED_ROW_SECONDS after its end.';
comment on column orca.run_clusters.run is 'The run.';
comment on column orca.run_clusters.start is 'How often the run had been started, with this one.';
comment on column orca.run_clusters.pipeline is 'Its pipeline.';
comment on column orca.run_clusters.cpu_millis is 'What its Pods request together, in thousandths of a CPU.';
comment on column orca.run_clusters.fill is 'Whether the run is a backfill.';
comment on column orca.run_clusters.created_at is 'When it was admitted.';
comment on column orca.run_clusters.waiting is 'What it waits for, in words; empty when nothing does.';
comment on column orca.run_clusters.ending_reason is 'Why it ends; what is left is deleted first, then the run is moved.';
comment on column orca.run_clusters.ending_detail is 'The same in words.';
comment on column orca.run_clusters.log_saved_at is 'When the driver''s log was saved.';
comment on column orca.run_clusters.ended_at is 'When nothing of it was left.';
comment on column orca.run_clusters.reason is 'Ended, Removed, DriverFailed, OOMKilled, DeadlineExceeded, ImagePull, HeadLost, Evicted, NeverStarted, Vanished or Refused.';

comment on table orca.runtime_pods is 'One row for each Pod of a runtime pool, or of a cold start. Kept ORCA_ENDED_ROW_SECONDS after its end.';
comment on column orca.runtime_pods.name is 'The Pod''s name.';
comment on column orca.runtime_pods.namespace is 'Its namespace.';
comment on column orca.runtime_pods.pool is 'Its pool; null: a cold start, a Pod of its own.';
comment on column orca.runtime_pods.environment is 'Its RuntimeEnvironment.';
comment on column orca.runtime_pods.requests is 'Its requests, in thousandths: {"cpu": 500, "memory": 536870912000}.';
comment on column orca.runtime_pods.size is 'Other resources, CPU, memory: says which of two Pods is smaller.';
comment on column orca.runtime_pods.placement is 'Its node selection, compared when a launch asks for one.';
comment on column orca.runtime_pods.burning_rate is 'Credits a second that a runtime burns here.';
comment on column orca.runtime_pods.cull_seconds is 'How long a runtime lives here; null: until it is stopped.';
comment on column orca.runtime_pods.created_at is 'When the row was written.';
comment on column orca.runtime_pods.uid is 'The Pod''s uid, once it was seen.';
comment on column orca.runtime_pods.ready_at is 'Since when it is Ready; null: it is not, or it goes away.';
comment on column orca.runtime_pods.unready_at is 'Since when it is Ready no more.';
comment on column orca.runtime_pods.address is 'Its IP address.';
comment on column orca.runtime_pods.problem is 'Why it is not Ready.';
comment on column orca.runtime_pods.taken_at is 'When a launch took it.';
comment on column orca.runtime_pods.ending_reason is 'Why it ends; what is left is deleted first, then the row ends.';
comment on column orca.runtime_pods.ending_detail is 'The same in words.';
comment on column orca.runtime_pods.ending_at is 'When its end began.';
comment on column orca.runtime_pods.ended_at is 'When nothing of it was left.';
comment on column orca.runtime_pods.reason is 'Why it ended.';

comment on table orca.runtimes is 'One row for each runtime that a user has or had. Kept ORCA_ENDED_ROW_SECONDS after its end.';
comment on column orca.runtimes.id is 'Its id.';
comment on column orca.runtimes.pod is 'Its Pod.';
comment on column orca.runtimes.user_name is 'Whose it is.';
comment on column orca.runtimes.environment is 'Its RuntimeEnvironment.';
comment on column orca.runtimes.warm is 'Whether a warm Pod was taken.';
comment on column orca.runtimes.idempotency_key is 'The launch''s key; a user''s own.';
comment on column orca.runtimes.burning_rate is 'Credits a second.';
comment on column orca.runtimes.assigned_at is 'Since when it is the user''s.';
comment on column orca.runtimes.expires_at is 'When it is culled; null: never.';
comment on column orca.runtimes.secret_made_at is 'When its Secret was made.';
comment on column orca.runtimes.ended_at is 'When it ended.';
comment on column orca.runtimes.reason is 'Why it ended.';
comment on column orca.runtimes.credits is 'What it burned, once it ended.';

comment on table orca.runtime_usage is 'One row for each ended runtime: what it cost. Kept for ever.';
comment on column orca.runtime_usage.runtime is 'The runtime''s id.';
comment on column orca.runtime_usage.user_name is 'Whose it was.';
comment on column orca.runtime_usage.environment is 'Its RuntimeEnvironment.';
comment on column orca.runtime_usage.pool is 'Its pool; null: a cold start.';
comment on column orca.runtime_usage.warm is 'Whether a warm Pod was taken.';
comment on column orca.runtime_usage.assigned_at is 'From when.';
comment on column orca.runtime_usage.ended_at is 'Until when: when its end began.';
comment on column orca.runtime_usage.seconds is 'How long.';
comment on column orca.runtime_usage.burning_rate is 'Credits a second.';
comment on column orca.runtime_usage.credits is 'The product of the two.';
comment on column orca.runtime_usage.reason is 'Why it ended.';

comment on function orca.worker_hello is 'For workers: say that it lives. A wrong or revoked token raises 28000.';
comment on function orca.worker_take is 'For workers: take the next run that may start; no row when there is none. A wrong or revoked token raises 28000.';
comment on function orca.worker_end is 'For workers: end a run; false when it is no longer the worker''s. A wrong or revoked token raises 28000.';
comment on function orca.machine_of is 'For the functions above: the machine whose token this is; raises 28000 when it is wrong or revoked.';
comment on function orca.revoke_machine is 'For the loop: revoke the token and queue the machine''s runs again (or fail them, past max_starts), in one transaction; not while something runs, or when a run ended there since a time, where that is asked.';
comment on function orca.move_run is 'For all of these: write a transition, by compare-and-set on state, start and worker.';
comment on function orca.runtime_seconds is 'How long a runtime has been charged for so far.';
comment on function orca.runtime_of_key is 'For launches: the runtime that a user''s idempotency key stands for; no row when there is none.';
comment on function orca.claim_runtime is 'For launches: the runtime of the key, else the smallest warm Pod that fits, taken exactly once; no row when none fits.';
comment on function orca.runtime_given is 'For launches: write down that the Pod has its Secret; false when it is ending already, and the launch takes the next.';
comment on type orca.runtime_claim is 'A runtime with its Pod, as launches see it.';
comment on function orca.server_history is 'The database server''s system identifier and timeline; null where it does not say.';
comment on function orca.begin_lead is 'For the loop that got the lead''s lock: begin a new epoch, and give it.';
comment on function orca.leads is 'For the loop: whether this epoch is the last and its lock still held; true until the transaction ends.';

comment on table orca.passes is 'One row for each pass that changed something, or did nothing for another reason than the one before: what it saw, decided and came to; orca-infra explain shows it. The newest ORCA_RECORD_PASSES of each scope are kept, none longer than ORCA_RECORD_SECONDS.';
comment on column orca.passes.id is 'With the scope before it, what the pass is called: machines-12.';
comment on column orca.passes.scope is 'machines, runs or runtimes.';
comment on column orca.passes.decided_at is 'The instant that its snapshot shows.';
comment on column orca.passes.ended_at is 'When it ended; null: it is under way, or its loop ended in it.';
comment on column orca.passes.outcome is 'Done, or the kind of the error that ended it.';
comment on column orca.passes.message is 'The error''s words.';
comment on column orca.passes.changed is 'How many actions changed something.';
comment on column orca.passes.version is 'Of the program.';
comment on column orca.passes.about is 'The pools, machines, objects, Pods and runs that it decided about.';
comment on column orca.passes.decisions is 'A list of objects: about (names), decided and why (words), acts (false: why nothing is done).';
comment on column orca.passes.record is 'Snapshot, limits and plan as compressed JSON, without secrets.';
