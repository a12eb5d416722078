/* Stub libnccl.so.2: the names, signatures and values of NCCL 2.32's nccl.h, between processes and without a GPU.
 *
 * As in the real library: every ncclX is weak and has a strong alias pncclX, a call only enqueues on a stream, calls in
 * a group begin at its end, ncclBcast calls ncclBroadcast, a communicator's hash follows from its unique id or from its
 * parent's hash, each function of a communicator has a counter of its own, and a failed network shows in
 * ncclCommGetAsyncError. What moves is said in stub_nccl_wire.c.
 */
#define _GNU_SOURCE
#include "stub_nccl.h"
#include "stub_cudart.h"

#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct ncclComm *ncclComm_t;
typedef struct { char internal[UNIQUE_ID_BYTES]; } ncclUniqueId;
typedef enum { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3, ncclAvg = 4 } ncclRedOp_t;
typedef int ncclDataType_t;
typedef void *cudaStream_t;

typedef struct {
  size_t size;
  unsigned magic, version;
  int blocking, cgaClusterSize, minCTAs, maxCTAs;
  const char *netName;
  int splitShare, trafficClass;
  const char *commName;
} ncclConfig_t;

#define API(result, name, ...) \
  __attribute__((visibility("default"), alias(#name))) result p##name(__VA_ARGS__); \
  __attribute__((visibility("default"), weak)) result name(__VA_ARGS__); \
  __attribute__((visibility("default"), weak)) result name(__VA_ARGS__)

enum { VERSION = 23203, MAX_GROUP = 2 * MAX_RANKS, NO_COLOR = -1, UNSET = INT_MIN };
static const uint64_t MAGIC = 0x4e43434c73747562;
/* int8 uint8 int32 uint32 int64 uint64 float16 float32 float64 bfloat16 float8e4m3 float8e5m2 */
static const int TYPE_BYTES[] = { 1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1 };
enum { N_TYPES = sizeof TYPE_BYTES / sizeof TYPE_BYTES[0] };

/* ---- hashes, as NCCL computes them ---- */

static void eat(uint64_t state[2], const void *bytes, size_t size) {
  const char *from = bytes;
  state[0] ^= size;
  while (size > 0) {
    uint64_t word = 0;
    size_t taken = size < sizeof word ? size : sizeof word;
    state[0] += state[1];
    state[1] ^= state[0];
    state[0] = (state[0] ^ state[0] >> 31) * 0x9de62bbc8cef3ce3;
    state[1] = (state[1] ^ state[1] >> 32) * 0x485cd6311b599e79;
    memcpy(&word, from, taken);
    state[0] += word;
    from += taken;
    size -= taken;
  }
}

static uint64_t digest(const uint64_t state[2]) {
  uint64_t hash = (state[0] ^ state[0] >> 31) * 0xbac3bd562846de6b + state[1];
  return (hash ^ hash >> 32) * 0x995a187a14e7b445;
}

static uint64_t hash_of_id(const ncclUniqueId *id) {
  uint64_t state[2] = { 1, 1 };
  eat(state, id, sizeof *id);
  return digest(state);
}

static uint64_t hash_of_child(uint64_t parent, int child, int color) {
  uint64_t state[2] = { 1, 1 };
  eat(state, &parent, sizeof parent);
  eat(state, &child, sizeof child);
  eat(state, &color, sizeof color);
  return digest(state);
}

/* ---- the open group of this thread ---- */

struct job { /* a communicator in the making */
  ncclComm_t comm, parent;
  int child, color, key;
  ncclComm_t *result;
};

struct work {
  int count;
  struct operation operations[MAX_GROUP];
};

static __thread int depth;
static __thread int n_jobs, n_operations;
static __thread struct job jobs[MAX_RANKS];
static __thread struct operation operations[MAX_GROUP];
static __thread cudaStream_t operation_streams[MAX_GROUP];

/* ---- work on a stream ---- */

static void run(void *argument) {
  struct work *work = argument;
  int first_peer = work->count;
  ncclResult_t result = ncclSuccess;
  for (int i = 0; i < work->count; i++)
    if (work->operations[i].function >= SEND && i < first_peer) first_peer = i;
  for (int i = 0; i < first_peer && result == ncclSuccess; i++) {
    uint64_t start_ns = stubNow();
    result = work->operations[i].comm->state;
    if (result == ncclSuccess) result = wire_collective(&work->operations[i]);
    if (result == ncclSuccess) inspector_note(&work->operations[i], start_ns, stubNow());
    else work->operations[i].comm->state = result;
  }
  if (first_peer < work->count && result == ncclSuccess) {
    struct operation *peers = &work->operations[first_peer];
    uint64_t start_ns = stubNow();
    result = peers->comm->state;
    if (result == ncclSuccess) result = wire_exchange(peers, work->count - first_peer);
    for (int i = first_peer; i < work->count; i++)
      if (result == ncclSuccess) inspector_note(&work->operations[i], start_ns, stubNow());
      else work->operations[i].comm->state = result;
  }
  free(work);
}

static void launch_stream(cudaStream_t stream) {
  struct work *work = malloc(sizeof *work);
  work->count = 0;
  /* Collectives in the order of their calls, then sends and receives all at once. */
  for (int is_peer = 0; is_peer <= 1; is_peer++)
    for (int i = 0; i < n_operations; i++)
      if (operation_streams[i] == stream && (operations[i].function >= SEND) == (is_peer == 1))
        work->operations[work->count++] = operations[i];
  stubStreamEnqueue(stream, run, work);
}

static void launch(void) {
  for (int i = 0; i < n_operations; i++) {
    bool is_first = true;
    operations[i].sequence = operations[i].comm->sequence[operations[i].function]++;
    for (int j = 0; j < i; j++) is_first &= operation_streams[j] != operation_streams[i];
    if (!is_first) continue;
    launch_stream(operation_streams[i]);
  }
  n_operations = 0;
}

/* ---- creation ---- */

static ncclResult_t find_place(struct job *job) {
  int colors[MAX_RANKS], keys[MAX_RANKS];
  ncclComm_t parent = job->parent, comm = job->comm;
  ncclResult_t result = wire_exchange_split(parent, job->child, job->color, job->key, colors, keys);
  if (result != ncclSuccess || !comm) return result;
  for (int i = 0; i < parent->size; i++) {
    if (colors[i] != job->color) continue;
    comm->size++;
    comm->rank += keys[i] < job->key || (keys[i] == job->key && i < parent->rank);
  }
  comm->hash = hash_of_child(parent->hash, job->child, job->color);
  return ncclSuccess;
}

static ncclResult_t finish(struct job *job) {
  ncclComm_t comm = job->comm;
  ncclResult_t result = job->parent ? find_place(job) : ncclSuccess;
  if (!comm) return result; /* a rank without a color */
  if (result == ncclSuccess) result = wire_open(comm);
  if (result == ncclSuccess) inspector_open(comm);
  comm->state = result;
  if (result == ncclSuccess) *job->result = comm; /* of a split, only now */
  return result;
}

static void *finish_apart(void *argument) {
  struct job *job = argument;
  finish(job);
  free(job);
  return NULL;
}

static ncclResult_t begin(struct job job) {
  if (depth > 0) {
    if (n_jobs == MAX_RANKS) return ncclInvalidUsage;
    jobs[n_jobs++] = job;
    return ncclSuccess;
  }
  if (!job.comm || job.comm->is_blocking) return finish(&job);
  pthread_t thread;
  struct job *copy = malloc(sizeof *copy);
  *copy = job;
  if (pthread_create(&thread, NULL, finish_apart, copy) != 0) return ncclSystemError;
  pthread_detach(thread);
  return ncclInProgress;
}

static ncclComm_t allocate(int size, int rank, const ncclConfig_t *config) {
  ncclComm_t comm = calloc(1, sizeof *comm);
  comm->magic = MAGIC;
  comm->size = size;
  comm->rank = rank;
  comm->state = ncclInProgress;
  comm->listener = comm->ring_in = comm->ring_out = -1;
  for (int i = 0; i < MAX_RANKS; i++) comm->in[i] = comm->out[i] = -1;
  comm->is_blocking = !config || config->blocking == UNSET || config->blocking != 0;
  bool has_name = config && config->size >= offsetof(ncclConfig_t, commName) + sizeof config->commName;
  if (has_name && config->commName) strncpy(comm->name, config->commName, NAME_BYTES - 1);
  return comm;
}

static ncclResult_t init(ncclComm_t *result, int size, const ncclUniqueId *id, int rank, const ncclConfig_t *config) {
  if (!result || !id || size < 1 || size > MAX_RANKS || rank < 0 || rank >= size) return ncclInvalidArgument;
  ncclComm_t comm = allocate(size, rank, config);
  comm->hash = hash_of_id(id);
  *result = comm;
  return begin((struct job){ .comm = comm, .result = result });
}

static bool is_valid(ncclComm_t comm) { return comm && comm->magic == MAGIC; }

API(ncclResult_t, ncclGetVersion, int *version) {
  if (!version) return ncclInvalidArgument;
  *version = VERSION;
  return ncclSuccess;
}

API(ncclResult_t, ncclGetUniqueId, ncclUniqueId *id) {
  int random = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
  if (!id || random < 0) return id ? ncclSystemError : ncclInvalidArgument;
  ssize_t length = read(random, id, sizeof *id);
  close(random);
  return length == sizeof *id ? ncclSuccess : ncclSystemError;
}

API(ncclResult_t, ncclCommInitRank, ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank) {
  return init(comm, nranks, &commId, rank, NULL);
}

API(ncclResult_t, ncclCommInitRankConfig, ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank,
    ncclConfig_t *config) {
  return init(comm, nranks, &commId, rank, config);
}

API(ncclResult_t, ncclCommInitRankScalable, ncclComm_t *newcomm, int nranks, int myrank, int nId,
    ncclUniqueId *commIds, ncclConfig_t *config) {
  if (nId < 1) return ncclInvalidArgument;
  return init(newcomm, nranks, commIds, myrank, config);
}

API(ncclResult_t, ncclCommSplit, ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config) {
  if (!is_valid(comm) || !newcomm || comm->state != ncclSuccess) return ncclInvalidArgument;
  *newcomm = NULL;
  struct job job = { .parent = comm, .child = ++comm->n_children, .color = color, .key = key, .result = newcomm };
  if (color != NO_COLOR) {
    job.comm = allocate(0, 0, config);
    if (!config) job.comm->is_blocking = comm->is_blocking;
  }
  return begin(job);
}

/* ---- the life of a communicator ---- */

API(ncclResult_t, ncclCommCount, const ncclComm_t comm, int *count) {
  if (!is_valid(comm) || !count) return ncclInvalidArgument;
  *count = comm->size;
  return ncclSuccess;
}

API(ncclResult_t, ncclCommUserRank, const ncclComm_t comm, int *rank) {
  if (!is_valid(comm) || !rank) return ncclInvalidArgument;
  *rank = comm->rank;
  return ncclSuccess;
}

API(ncclResult_t, ncclCommCuDevice, const ncclComm_t comm, int *device) {
  if (!is_valid(comm) || !device) return ncclInvalidArgument;
  *device = stubPhysicalDevice();
  return ncclSuccess;
}

API(ncclResult_t, ncclCommGetAsyncError, ncclComm_t comm, ncclResult_t *asyncError) {
  if (!is_valid(comm) || !asyncError) return ncclInvalidArgument;
  *asyncError = (ncclResult_t)comm->state;
  return ncclSuccess;
}

API(ncclResult_t, ncclCommFinalize, ncclComm_t comm) { return is_valid(comm) ? ncclSuccess : ncclInvalidArgument; }

static ncclResult_t end(ncclComm_t comm) {
  if (!comm) return ncclSuccess;
  if (!is_valid(comm)) return ncclInvalidArgument;
  inspector_close(comm);
  wire_close(comm);
  comm->magic = 0;
  free(comm);
  return ncclSuccess;
}

API(ncclResult_t, ncclCommDestroy, ncclComm_t comm) { return end(comm); }

API(ncclResult_t, ncclCommAbort, ncclComm_t comm) {
  if (!is_valid(comm)) return comm ? ncclInvalidArgument : ncclSuccess;
  comm->is_aborted = true;
  return ncclSuccess; /* a transfer may still be looking at it: what an aborted communicator holds goes with the process */
}

API(const char *, ncclGetErrorString, ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error";
    case ncclSystemError: return "unhandled system error";
    case ncclInternalError: return "internal error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
  }
}

API(const char *, ncclGetLastError, const ncclComm_t comm) {
  (void)comm;
  return "";
}

/* The communicator's hash, which the real library tells in its logs and to its plug-ins only. */
__attribute__((visibility("default"))) uint64_t stubCommHash(ncclComm_t comm) { return comm->hash; }

/* ---- groups and calls ---- */

API(ncclResult_t, ncclGroupStart, void) {
  depth++;
  return ncclSuccess;
}

API(ncclResult_t, ncclGroupEnd, void) {
  ncclResult_t result = ncclSuccess;
  if (depth == 0) return ncclInvalidUsage;
  if (--depth > 0) return ncclSuccess;
  for (int i = 0; i < n_jobs && result == ncclSuccess; i++) result = finish(&jobs[i]);
  n_jobs = 0;
  launch();
  return result;
}

static ncclResult_t call(enum function function, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                         cudaStream_t stream) {
  if (!is_valid(comm) || type < 0 || type >= N_TYPES || peer < 0 || peer >= comm->size) return ncclInvalidArgument;
  if (comm->state != ncclSuccess) return (ncclResult_t)comm->state;
  if (n_operations == MAX_GROUP) return ncclInvalidUsage;
  operation_streams[n_operations] = stream;
  operations[n_operations++] = (struct operation){
    .function = function, .comm = comm, .bytes = count * (size_t)TYPE_BYTES[type], .peer = peer, .called_ns = stubNow(),
  };
  if (depth == 0) launch();
  return ncclSuccess;
}

static ncclResult_t reduce_with(ncclRedOp_t op) { return (int)op < 0 ? ncclInvalidArgument : ncclSuccess; }

API(ncclResult_t, ncclAllReduce, const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  (void)sendbuff, (void)recvbuff;
  return reduce_with(op) == ncclSuccess ? call(ALL_REDUCE, count, datatype, 0, comm, stream) : ncclInvalidArgument;
}

API(ncclResult_t, ncclReduceScatter, const void *sendbuff, void *recvbuff, size_t recvcount, ncclDataType_t datatype,
    ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  (void)sendbuff, (void)recvbuff;
  if (reduce_with(op) != ncclSuccess) return ncclInvalidArgument;
  return call(REDUCE_SCATTER, recvcount, datatype, 0, comm, stream);
}

API(ncclResult_t, ncclAllGather, const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype,
    ncclComm_t comm, cudaStream_t stream) {
  (void)sendbuff, (void)recvbuff;
  return call(ALL_GATHER, sendcount, datatype, 0, comm, stream);
}

API(ncclResult_t, ncclBroadcast, const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
    ncclComm_t comm, cudaStream_t stream) {
  (void)sendbuff, (void)recvbuff;
  return call(BROADCAST, count, datatype, root, comm, stream);
}

API(ncclResult_t, ncclBcast, void *buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
    cudaStream_t stream) {
  return ncclBroadcast(buff, buff, count, datatype, root, comm, stream);
}

API(ncclResult_t, ncclReduce, const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  (void)sendbuff, (void)recvbuff;
  return reduce_with(op) == ncclSuccess ? call(REDUCE, count, datatype, root, comm, stream) : ncclInvalidArgument;
}

API(ncclResult_t, ncclSend, const void *sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
    cudaStream_t stream) {
  (void)sendbuff;
  return call(SEND, count, datatype, peer, comm, stream);
}

API(ncclResult_t, ncclRecv, void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
    cudaStream_t stream) {
  (void)recvbuff;
  return call(RECV, count, datatype, peer, comm, stream);
}

/* The three below are sends and receives with all, from all or both, as in the real library. */
static ncclResult_t fan(bool sends, bool receives, size_t count, ncclDataType_t type, ncclComm_t comm,
                        cudaStream_t stream) {
  if (!is_valid(comm)) return ncclInvalidArgument;
  ncclResult_t result = ncclSuccess;
  depth++;
  for (int peer = 0; peer < comm->size && result == ncclSuccess; peer++) {
    if (sends) result = call(SEND, count, type, peer, comm, stream);
    if (receives && result == ncclSuccess) result = call(RECV, count, type, peer, comm, stream);
  }
  if (--depth == 0) launch();
  return result;
}

API(ncclResult_t, ncclAlltoAll, const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
    ncclComm_t comm, cudaStream_t stream) {
  (void)sendbuff, (void)recvbuff;
  return fan(true, true, count, datatype, comm, stream);
}

API(ncclResult_t, ncclGather, const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
    ncclComm_t comm, cudaStream_t stream) {
  (void)sendbuff, (void)recvbuff;
  if (!is_valid(comm) || root < 0 || root >= comm->size) return ncclInvalidArgument;
  depth++;
  ncclResult_t result = call(SEND, count, datatype, root, comm, stream);
  if (comm->rank == root && result == ncclSuccess) result = fan(false, true, count, datatype, comm, stream);
  if (--depth == 0) launch();
  return result;
}

API(ncclResult_t, ncclScatter, const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
    ncclComm_t comm, cudaStream_t stream) {
  (void)sendbuff, (void)recvbuff;
  if (!is_valid(comm) || root < 0 || root >= comm->size) return ncclInvalidArgument;
  depth++;
  ncclResult_t result = call(RECV, count, datatype, root, comm, stream);
  if (comm->rank == root && result == ncclSuccess) result = fan(true, false, count, datatype, comm, stream);
  if (--depth == 0) launch();
  return result;
}
