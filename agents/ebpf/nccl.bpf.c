/* What rank processes ask of NCCL and when they wait for their GPU, seen at the public functions of both libraries.
 *
 * A run of equal calls is one record. A process has one open run at most; it is closed, and goes to user space, when
 * something else happens in the process: a different call, a call by another thread, a synchronisation, the boundary of
 * a group, the making or end of a communicator, or nothing at all for GAP_NS. User space reads runs that stay open
 * straight from the map, and only when they have been idle for twice EXTEND_NS: a call that is shorter than that began
 * within GAP_NS and has ended long ago, and a longer one begins a run of its own, so that what was read grows no more.
 *
 * What happens at every call is to find the thread at its entry, and thread and process at its return; nothing is
 * inserted or deleted, and nobody is woken. Calls that a library makes to itself on the way (ncclBcast calls ncclBroadcast) lie deeper in the
 * same thread's stack, and are not counted.
 *
 * Compiled with RAW, every call is a record; with ENTRY_ONLY, there are no return probes and calls have no duration.
 */
#include <failslow/portable.h>

#define GAP_NS 10000000
#define EXTEND_NS 500000000 /* half of IDLE_NS of agents/ebpf/kernel_state.py */
#define NESTED_NS 1000000000
#ifndef THREADS
#define THREADS 16384
#define PROCESSES 1024
#endif
#define PLACES 8 /* where a thread or process may be */
#define COUNT_MAX 65535
#define SPINS_MAX 64
#define OPS 16
#define UNRESOLVED_MAX 16
#define RANKS_MAX 16
#define IN_PROGRESS 7

/* Numbers of schemas.events.Op; OTHER is counted as the last but one. */
enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, SEND, RECV, ALL_TO_ALL, OTHER = 255 };
enum { CALL, SYNC };
enum { STREAM, EVENT, DEVICE };
/* As in agents/ebpf/functions.py. */
enum { INIT_RANK, INIT_RANK_CONFIG, INIT_RANK_SCALABLE, INIT_ALL, SPLIT, SHRINK, GROW, DESTROY, ABORT };

/* RUN_DTYPE of agents/ebpf/records.py; of a synchronisation, depth is its kind. */
struct run {
    u32 tgid;
    u32 tid;
    u8 op;
    u8 depth;
    u16 what;
    s32 result;
    u32 peer;
    u32 count;
    u64 comm;
    u64 bytes;
    u64 first_seq;
    u64 start_ns;
    u64 end_ns;
    u64 total_ns;
    u64 least_ns;
};

/* CREATION_DTYPE of agents/ebpf/records.py. */
struct creation {
    u64 time_ns;
    u64 comm;
    u64 parent;
    u64 out; /* where the library writes the new communicator */
    u32 tgid;
    u32 tid;
    s32 n_ranks;
    s32 rank;
    s32 color;
    s32 key;
    s32 result;
    u8 function;
    u8 has_id;
    u8 is_resolved; /* a second record of the same creation, now that comm is known */
    u8 is_waiting;  /* a second record follows when the communicator is used */
    char id[128];
    char name[64];
};

/* A thread's call between entry and return. */
struct thread {
    u64 owner; /* 0: nobody's */
    u64 start_ns;
    u64 comm;
    u64 bytes;
    u64 stack;
    u32 peer;
    u8 op;
    u8 depth;
    u8 is_inside;
    u8 kind;
};

struct process {
    struct run run; /* open while its count is not 0 */
    u64 owner;      /* 0: nobody's */
    u64 lock;
    u64 lost_calls;
    u32 is_broken; /* something happened while the lock was taken */
    u32 n_unresolved;
    u64 next_unresolved;
};

struct comm_key {
    u64 comm;
    u32 tgid;
    u32 zero;
};

struct counters {
    u64 next[OPS];
};

struct unresolved_key {
    u32 tgid;
    u32 place;
};

/* Both are looked up by hand: at a number's own place and a few after it. A hash map's own look-up takes 50 ns. */
SHARED_ARRAY(threads, struct thread, THREADS);
SHARED_ARRAY(processes, struct process, PROCESSES);
HASH(counters, struct comm_key, struct counters, 16384);
ARRAY(no_counts, struct counters, 1); /* all 0: the stack is small */
HASH(creating, u64, struct creation, 1024);
HASH(unresolved, struct unresolved_key, struct creation, 1024);
HASH(reported, u32, u64, 1024);
PERCPU_HASH(launches, u32, u64, 1024);
ARRAY(lost, u64, 2); /* of communicators, of all else */
RING(runs, RING_BYTES);
RING(creations, 1 << 19);

static __always_inline void lose_one(u32 place)
{
    u64 *n = LOOKUP(lost, &place);
    if (n)
        __sync_fetch_and_add(n, 1);
}

/* That a communicator was made, or that it ended. */
static __always_inline void lose_creation(void)
{
    lose_one(0);
}

static __always_inline void lose_other(void)
{
    lose_one(1);
}

static __always_inline struct process *find_process(u32 tgid)
{
    for (u32 i = 0; i < PLACES; i++) {
        u32 place = (tgid + i) % PROCESSES;
        struct process *process = LOOKUP(processes, &place);
        if (process && process->owner == tgid)
            return process;
    }
    return 0;
}

static __always_inline struct process *process_of(u32 tgid)
{
    struct process *found = find_process(tgid);
    if (found)
        return found;
    for (u32 i = 0; i < PLACES; i++) {
        u32 place = (tgid + i) % PROCESSES;
        struct process *process = LOOKUP(processes, &place);
        if (!process)
            continue;
        u64 owner = __sync_val_compare_and_swap(&process->owner, 0, tgid);
        if (owner == 0 || owner == tgid)
            return process;
    }
    return 0;
}

static __always_inline struct thread *find_thread(u64 id)
{
    for (u32 i = 0; i < PLACES; i++) {
        u32 place = ((u32)id + i) % THREADS;
        struct thread *thread = LOOKUP(threads, &place);
        if (thread && thread->owner == id)
            return thread;
    }
    return 0;
}

/* A thread that is in no call and no group has nothing to lose: where no place is free, it gives up its own. */
static __always_inline struct thread *take_place(u64 id, bool is_free)
{
    for (u32 i = 0; i < PLACES; i++) {
        u32 place = ((u32)id + i) % THREADS;
        struct thread *thread = LOOKUP(threads, &place);
        if (!thread)
            continue;
        u64 owner = is_free ? 0 : thread->owner;
        if (!thread->is_inside && !thread->depth && __sync_val_compare_and_swap(&thread->owner, owner, id) == owner)
            return thread;
    }
    return 0;
}

static __always_inline struct thread *thread_of(u64 id)
{
    struct thread *thread = find_thread(id);
    if (!thread)
        thread = take_place(id, true);
    if (!thread)
        thread = take_place(id, false);
    return thread;
}

/* A thread that runs deeper in its stack than where its call began has not left that call. One that does not has left
 * it on a way that the return probe did not see, as when probes were removed; so may have one that is inside for long. */
static __always_inline bool is_nested(struct pt_regs *ctx, struct thread *thread)
{
    return thread->is_inside && STACK(ctx) < thread->stack && bpf_ktime_get_ns() - thread->start_ns < NESTED_NS;
}

/* Another thread may be at work on another CPU for less than a microsecond. */
static __always_inline bool lock(struct process *process)
{
    for (int i = 0; i < SPINS_MAX; i++)
        if (__sync_val_compare_and_swap(&process->lock, 0, 1) == 0)
            return true;
    process->is_broken = 1;
    return false;
}

static __always_inline void unlock(struct process *process)
{
    __sync_lock_test_and_set(&process->lock, 0);
}

/* A run that user space has read from the map already is not lost. */
static __always_inline void lose(struct process *process, struct run *run)
{
    u32 tgid = run->tgid;
    u64 *start_ns = LOOKUP(reported, &tgid);
    if (!start_ns || *start_ns != run->start_ns)
        __sync_fetch_and_add(&process->lost_calls, run->count);
}

static __always_inline void emit(struct process *process, struct run *run)
{
    if (OUTPUT(runs, run, sizeof(*run), BPF_RB_NO_WAKEUP))
        lose(process, run);
}

static __always_inline void close_run(struct process *process)
{
    struct run *run = &process->run;
    if (!run->count)
        return;
    if (run->count > 1) {
        struct comm_key key = {.comm = run->comm, .tgid = run->tgid};
        struct counters *counter = LOOKUP(counters, &key);
        if (counter)
            counter->next[run->op & (OPS - 1)] += run->count - 1;
    }
    emit(process, run);
    run->count = 0;
}

static __always_inline void interrupt(struct process *process)
{
    if (!process->run.count)
        return;
    if (!lock(process))
        return;
    close_run(process);
    unlock(process);
}

/* Begins a communicator's counters anew. */
static __always_inline void reset(u32 tgid, u64 comm)
{
    struct comm_key key = {.comm = comm, .tgid = tgid};
    u32 zero = 0;
    struct counters *none = LOOKUP(no_counts, &zero);
    if (none)
        UPDATE(counters, &key, none);
}

/* Looks whether a communicator that is used for the first time is one whose creation had not finished at its return. */
static __always_inline void resolve(struct process *process, u32 tgid, u64 comm)
{
    if (!process->n_unresolved)
        return;
    struct unresolved_key key = {.tgid = tgid};
    for (int i = 0; i < UNRESOLVED_MAX; i++) {
        key.place = i;
        struct creation *creation = LOOKUP(unresolved, &key);
        if (!creation || read_u64(creation->out) != comm)
            continue;
        creation->comm = comm;
        creation->is_resolved = 1;
        if (OUTPUT(creations, creation, sizeof(*creation), BPF_RB_NO_WAKEUP))
            lose_creation();
        DELETE(unresolved, &key);
        process->n_unresolved--;
        return;
    }
}

static __always_inline struct counters *counters_of(struct process *process, u32 tgid, u64 comm)
{
    struct comm_key key = {.comm = comm, .tgid = tgid};
    struct counters *counter = LOOKUP(counters, &key);
    if (counter)
        return counter;
    reset(tgid, comm);
    resolve(process, tgid, comm);
    return LOOKUP(counters, &key);
}

#ifndef RAW
static __always_inline bool belongs(struct process *process, struct thread *thread, u32 tid, u64 end_ns)
{
    struct run *run = &process->run;
    return run->count && run->tid == tid && run->comm == thread->comm && run->bytes == thread->bytes &&
           run->op == thread->op && run->peer == thread->peer && run->count < COUNT_MAX && !process->is_broken &&
           thread->start_ns - run->end_ns <= GAP_NS && end_ns - run->end_ns < EXTEND_NS;
}
#endif

static __always_inline void fill(struct run *run, struct thread *thread, u64 id, u64 end_ns, s32 result, u64 seq)
{
    run->tgid = id >> 32;
    run->tid = id;
    run->op = thread->op;
    run->depth = thread->depth;
    run->what = CALL;
    run->result = result;
    run->peer = thread->peer;
    run->count = 1;
    run->comm = thread->comm;
    run->bytes = thread->bytes;
    run->first_seq = seq;
    run->start_ns = thread->start_ns;
    run->end_ns = end_ns;
    run->total_ns = run->least_ns = end_ns - thread->start_ns;
}

/* NCCL numbers neither what it refused nor what moves nothing; such a call has the number of the one that follows. */
static __always_inline bool is_numbered(struct thread *thread, s32 result)
{
    return thread->bytes && (result == 0 || result == IN_PROGRESS);
}

static __always_inline void record_alone(struct process *process, struct thread *thread, u64 id, u64 end_ns, s32 result)
{
    struct counters *counter = counters_of(process, id >> 32, thread->comm);
    if (!counter) {
        __sync_fetch_and_add(&process->lost_calls, 1);
        return;
    }
    struct run run = {};
    u64 *next = &counter->next[thread->op & (OPS - 1)];
    fill(&run, thread, id, end_ns, result, *next);
    if (is_numbered(thread, result))
        (*next)++;
    emit(process, &run);
}

static __always_inline void record(struct thread *thread, u64 id, u64 end_ns, s32 result)
{
    struct process *process = process_of(id >> 32);
    if (!process) {
        lose_other();
        return;
    }
#ifdef RAW
    record_alone(process, thread, id, end_ns, result);
#else
    if (!lock(process)) {
        record_alone(process, thread, id, end_ns, result);
        return;
    }
    struct run *run = &process->run;
    if (!is_numbered(thread, result)) {
        close_run(process);
        process->is_broken = 0;
        record_alone(process, thread, id, end_ns, result);
    } else if (belongs(process, thread, id, end_ns)) {
        u64 duration_ns = end_ns - thread->start_ns;
        run->count++;
        run->end_ns = end_ns;
        run->total_ns += duration_ns;
        if (duration_ns < run->least_ns)
            run->least_ns = duration_ns;
    } else {
        close_run(process);
        process->is_broken = 0;
        struct counters *counter = counters_of(process, id >> 32, thread->comm);
        if (counter)
            fill(run, thread, id, end_ns, result, counter->next[thread->op & (OPS - 1)]++);
        else
            __sync_fetch_and_add(&process->lost_calls, 1);
    }
    unlock(process);
#endif
}

/* ncclDataType_t to the logarithm of its size: int8, uint8, int32, uint32, int64, uint64, float16, float32, float64,
 * bfloat16 and two of 8 bits. A type that is newer than this counts as one byte. */
static __always_inline u64 n_bytes(u64 count, u32 type)
{
    u32 logarithms = 0 | 0 << 2 | 2 << 4 | 2 << 6 | 3 << 8 | 3 << 10 | 1 << 12 | 2 << 14 | 3 << 16 | 1 << 18;
    return type < 16 ? count << ((logarithms >> (2 * type)) & 3) : count;
}

static __always_inline int enter(struct pt_regs *ctx, u8 op, u64 count, u32 type, u64 comm, u32 peer)
{
    u64 id = bpf_get_current_pid_tgid();
    struct thread *thread = thread_of(id);
    if (!thread) {
        lose_other();
        return 0;
    }
    if (is_nested(ctx, thread))
        return 0;
    thread->op = op;
    thread->comm = comm;
    thread->bytes = n_bytes(count, type);
    thread->peer = peer;
    thread->stack = STACK(ctx);
    thread->start_ns = bpf_ktime_get_ns();
#ifdef ENTRY_ONLY
    record(thread, id, thread->start_ns, 0);
#else
    thread->is_inside = 1;
#endif
    return 0;
}

/* The thread whose outermost probed call returns now; none for a call within that one. */
static __always_inline struct thread *leaving(struct pt_regs *ctx, u64 id)
{
    struct thread *thread = find_thread(id);
    if (!thread || !thread->is_inside || STACK(ctx) != STACK_AFTER_RETURN(thread->stack))
        return 0;
    thread->is_inside = 0;
    return thread;
}

PROGRAM int leave_call(struct pt_regs *ctx)
{
    u64 end_ns = bpf_ktime_get_ns();
    u64 id = bpf_get_current_pid_tgid();
    struct thread *thread = leaving(ctx, id);
    if (thread)
        record(thread, id, end_ns, RESULT(ctx));
    return 0;
}

PROGRAM int enter_all_reduce(struct pt_regs *ctx)
{
    return enter(ctx, ALL_REDUCE, ARG3(ctx), ARG4(ctx), ARG6(ctx), 0);
}

PROGRAM int enter_reduce_scatter(struct pt_regs *ctx)
{
    return enter(ctx, REDUCE_SCATTER, ARG3(ctx), ARG4(ctx), ARG6(ctx), 0);
}

PROGRAM int enter_all_gather(struct pt_regs *ctx)
{
    return enter(ctx, ALL_GATHER, ARG3(ctx), ARG4(ctx), ARG5(ctx), 0);
}

PROGRAM int enter_all_to_all(struct pt_regs *ctx)
{
    return enter(ctx, ALL_TO_ALL, ARG3(ctx), ARG4(ctx), ARG5(ctx), 0);
}

PROGRAM int enter_broadcast(struct pt_regs *ctx)
{
    return enter(ctx, BROADCAST, ARG3(ctx), ARG4(ctx), ARG6(ctx), ARG5(ctx));
}

PROGRAM int enter_bcast(struct pt_regs *ctx)
{
    return enter(ctx, BROADCAST, ARG2(ctx), ARG3(ctx), ARG5(ctx), ARG4(ctx));
}

PROGRAM int enter_reduce(struct pt_regs *ctx)
{
    return enter(ctx, REDUCE, ARG3(ctx), ARG4(ctx), ARG7(ctx), ARG6(ctx));
}

PROGRAM int enter_rooted(struct pt_regs *ctx)
{
    return enter(ctx, OTHER, ARG3(ctx), ARG4(ctx), ARG6(ctx), ARG5(ctx));
}

PROGRAM int enter_send(struct pt_regs *ctx)
{
    return enter(ctx, SEND, ARG2(ctx), ARG3(ctx), ARG5(ctx), ARG4(ctx));
}

PROGRAM int enter_recv(struct pt_regs *ctx)
{
    return enter(ctx, RECV, ARG2(ctx), ARG3(ctx), ARG5(ctx), ARG4(ctx));
}

static __always_inline int cross(struct pt_regs *ctx, int change)
{
    u64 id = bpf_get_current_pid_tgid();
    struct thread *thread = thread_of(id);
    if (!thread) {
        lose_other();
        return 0;
    }
    if (is_nested(ctx, thread))
        return 0;
    if (change > 0 && thread->depth < 255)
        thread->depth++;
    if (change < 0 && thread->depth > 0)
        thread->depth--;
    u32 tgid = id >> 32;
    struct process *process = find_process(tgid);
    if (process)
        interrupt(process);
    return 0;
}

PROGRAM int enter_group_start(struct pt_regs *ctx)
{
    return cross(ctx, 1);
}

PROGRAM int enter_group_end(struct pt_regs *ctx)
{
    return cross(ctx, -1);
}

static __always_inline void record_sync(struct thread *thread, u64 id, u64 end_ns)
{
    struct run sync = {
        .tgid = id >> 32,
        .tid = id,
        .depth = thread->kind,
        .what = SYNC,
        .start_ns = thread->start_ns,
        .end_ns = end_ns,
    };
    u32 tgid = id >> 32;
    struct process *process = find_process(tgid);
    if (process)
        interrupt(process);
    if (OUTPUT(runs, &sync, sizeof(sync), BPF_RB_NO_WAKEUP))
        lose_other();
}

static __always_inline int enter_sync(struct pt_regs *ctx, u8 kind)
{
    u64 id = bpf_get_current_pid_tgid();
    struct thread *thread = thread_of(id);
    if (!thread) {
        lose_other();
        return 0;
    }
    if (is_nested(ctx, thread))
        return 0;
    thread->kind = kind;
    thread->stack = STACK(ctx);
    thread->start_ns = bpf_ktime_get_ns();
#ifdef ENTRY_ONLY
    record_sync(thread, id, thread->start_ns);
#else
    thread->is_inside = 1;
#endif
    return 0;
}

PROGRAM int enter_stream_sync(struct pt_regs *ctx)
{
    return enter_sync(ctx, STREAM);
}

PROGRAM int enter_event_sync(struct pt_regs *ctx)
{
    return enter_sync(ctx, EVENT);
}

PROGRAM int enter_device_sync(struct pt_regs *ctx)
{
    return enter_sync(ctx, DEVICE);
}

PROGRAM int leave_sync(struct pt_regs *ctx)
{
    u64 end_ns = bpf_ktime_get_ns();
    u64 id = bpf_get_current_pid_tgid();
    struct thread *thread = leaving(ctx, id);
    if (thread)
        record_sync(thread, id, end_ns);
    return 0;
}

PROGRAM int count_launch(struct pt_regs *ctx)
{
    u32 tgid = bpf_get_current_pid_tgid() >> 32;
    u64 one = 1;
    u64 *n = LOOKUP(launches, &tgid);
    if (n)
        (*n)++;
    else
        UPDATE(launches, &tgid, &one);
    return 0;
}

/* Keeps a creation whose communicator is not known yet, in place of the oldest that was never used. */
static __always_inline void wait_for_use(struct process *process, struct creation *creation)
{
    struct unresolved_key key = {.tgid = creation->tgid, .place = process->next_unresolved++ % UNRESOLVED_MAX};
    if (!LOOKUP(unresolved, &key))
        process->n_unresolved++;
    creation->is_waiting = 1;
    UPDATE(unresolved, &key, creation);
}

static __always_inline void publish(struct process *process, struct creation *creation)
{
    bool is_good = creation->result == 0 || creation->result == IN_PROGRESS;
    bool is_member = creation->function != SPLIT || creation->color >= 0;
    if (creation->comm)
        reset(creation->tgid, creation->comm);
    else if (is_good && is_member)
        wait_for_use(process, creation);
    if (OUTPUT(creations, creation, sizeof(*creation), BPF_RB_NO_WAKEUP))
        lose_creation();
}

static __always_inline int enter_creation(struct pt_regs *ctx, struct creation *creation, u64 config, u64 id_at)
{
    u64 id = bpf_get_current_pid_tgid();
    struct thread *thread = thread_of(id);
    struct process *process = process_of(id >> 32);
    if (!thread || !process) {
        lose_creation();
        return 0;
    }
    if (is_nested(ctx, thread))
        return 0;
    interrupt(process);
    creation->tgid = id >> 32;
    creation->tid = id;
    if (creation->parent)
        counters_of(process, creation->tgid, creation->parent);
    if (id_at)
        creation->has_id = bpf_probe_read_user(creation->id, sizeof(creation->id), (void *)id_at) == 0;
    /* ncclConfig_t: its size comes first, the name is the pointer that ends at byte 56. */
    if (config && read_u64(config) >= 56) {
        u64 name = read_u64(config + 48);
        if (name)
            bpf_probe_read_user_str(creation->name, sizeof(creation->name), (void *)name);
    }
#ifdef ENTRY_ONLY
    creation->time_ns = bpf_ktime_get_ns();
    publish(process, creation);
#else
    if (UPDATE(creating, &id, creation)) {
        lose_creation();
        return 0;
    }
    thread->stack = STACK(ctx);
    thread->start_ns = bpf_ktime_get_ns();
    thread->is_inside = 1;
#endif
    return 0;
}

#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
/* A structure of 128 bytes by value: the caller passes a pointer to its copy, in its turn among the arguments. */
#define ID_BY_VALUE(ctx) ARG3(ctx)
#define AFTER_ID_1(ctx) ARG4(ctx)
#define AFTER_ID_2(ctx) ARG5(ctx)
#else
/* By value on the stack: the registers go on as if it were not there. */
#define ID_BY_VALUE(ctx) (STACK(ctx) + 8)
#define AFTER_ID_1(ctx) ARG3(ctx)
#define AFTER_ID_2(ctx) ARG4(ctx)
#endif

PROGRAM int enter_init_rank(struct pt_regs *ctx)
{
    struct creation creation = {
        .function = INIT_RANK, .out = ARG1(ctx), .n_ranks = ARG2(ctx), .rank = AFTER_ID_1(ctx)};
    return enter_creation(ctx, &creation, 0, ID_BY_VALUE(ctx));
}

PROGRAM int enter_init_rank_config(struct pt_regs *ctx)
{
    struct creation creation = {
        .function = INIT_RANK_CONFIG, .out = ARG1(ctx), .n_ranks = ARG2(ctx), .rank = AFTER_ID_1(ctx)};
    return enter_creation(ctx, &creation, AFTER_ID_2(ctx), ID_BY_VALUE(ctx));
}

PROGRAM int enter_init_rank_scalable(struct pt_regs *ctx)
{
    struct creation creation = {
        .function = INIT_RANK_SCALABLE, .out = ARG1(ctx), .n_ranks = ARG2(ctx), .rank = ARG3(ctx)};
    return enter_creation(ctx, &creation, ARG6(ctx), ARG5(ctx));
}

PROGRAM int enter_init_all(struct pt_regs *ctx)
{
    struct creation creation = {.function = INIT_ALL, .out = ARG1(ctx), .n_ranks = ARG2(ctx)};
    return enter_creation(ctx, &creation, 0, 0);
}

PROGRAM int enter_split(struct pt_regs *ctx)
{
    struct creation creation = {
        .function = SPLIT, .parent = ARG1(ctx), .color = ARG2(ctx), .key = ARG3(ctx), .out = ARG4(ctx)};
    return enter_creation(ctx, &creation, ARG5(ctx), 0);
}

PROGRAM int enter_shrink(struct pt_regs *ctx)
{
    struct creation creation = {.function = SHRINK, .parent = ARG1(ctx), .out = ARG4(ctx)};
    return enter_creation(ctx, &creation, ARG5(ctx), 0);
}

PROGRAM int enter_grow(struct pt_regs *ctx)
{
    struct creation creation = {
        .function = GROW, .parent = ARG1(ctx), .n_ranks = ARG2(ctx), .rank = ARG4(ctx), .out = ARG5(ctx)};
    return enter_creation(ctx, &creation, ARG6(ctx), ARG3(ctx));
}

/* The creation that this thread's call has finished; none for a call within another. */
static __always_inline struct creation *created(struct pt_regs *ctx, u64 id, u64 time_ns)
{
    if (!leaving(ctx, id))
        return 0;
    struct creation *creation = LOOKUP(creating, &id);
    if (!creation)
        return 0;
    creation->time_ns = time_ns;
    creation->result = RESULT(ctx);
    return creation;
}

PROGRAM int leave_creation(struct pt_regs *ctx)
{
    u64 time_ns = bpf_ktime_get_ns();
    u64 id = bpf_get_current_pid_tgid();
    struct creation *creation = created(ctx, id, time_ns);
    if (!creation)
        return 0;
    struct process *process = process_of(id >> 32);
    if (!process) {
        lose_creation();
        DELETE(creating, &id);
        return 0;
    }
    creation->comm = read_u64(creation->out);
    publish(process, creation);
    DELETE(creating, &id);
    return 0;
}

PROGRAM int leave_init_all(struct pt_regs *ctx)
{
    u64 time_ns = bpf_ktime_get_ns();
    u64 id = bpf_get_current_pid_tgid();
    struct creation *creation = created(ctx, id, time_ns);
    if (!creation)
        return 0;
    for (int i = 0; i < RANKS_MAX && i < creation->n_ranks; i++) {
        creation->rank = i;
        creation->comm = read_u64(creation->out + 8 * i);
        reset(creation->tgid, creation->comm);
        if (OUTPUT(creations, creation, sizeof(*creation), BPF_RB_NO_WAKEUP))
            lose_creation();
    }
    DELETE(creating, &id);
    return 0;
}

/* The pointer may be given away again before this call returns, so it ends here. */
static __always_inline int end(struct pt_regs *ctx, u8 function)
{
    u64 id = bpf_get_current_pid_tgid();
    struct process *process = process_of(id >> 32);
    struct thread *thread = find_thread(id);
    if (!process) {
        lose_creation();
        return 0;
    }
    if (thread && is_nested(ctx, thread))
        return 0;
    struct creation ended = {
        .time_ns = bpf_ktime_get_ns(), .comm = ARG1(ctx), .tgid = id >> 32, .tid = id, .function = function};
    struct comm_key key = {.comm = ended.comm, .tgid = ended.tgid};
    interrupt(process);
    resolve(process, ended.tgid, ended.comm);
    if (OUTPUT(creations, &ended, sizeof(ended), BPF_RB_NO_WAKEUP))
        lose_creation();
    DELETE(counters, &key);
    return 0;
}

PROGRAM int enter_destroy(struct pt_regs *ctx)
{
    return end(ctx, DESTROY);
}

PROGRAM int enter_abort(struct pt_regs *ctx)
{
    return end(ctx, ABORT);
}
