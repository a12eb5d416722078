/* The files of NCCL's Inspector plug-in, in the shapes that its versions write: one JSON object a line in
 * $NCCL_INSPECTOR_DUMP_DIR/<hostname>-pid<PID>.log, where $NCCL_INSPECTOR_ENABLE is 1.
 *
 * $STUB_INSPECTOR_VERSION chooses the shape:
 *   2.28  format v4.0; only the last completed collective of a communicator and dump, no names, no send and receive
 *   4.0   format v4.0 as of NCCL 2.30: everything that fits into a ring of 1024 per communicator (the default)
 *   4.1, 4.2  a line of counts before each communicator's records; 4.2 adds algorithm and protocol
 *   4.3, 4.4  header and metadata only in the line of counts, none in the records that follow it
 *
 * NCCL's own variables are honoured: NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS (-1, the default: only when a
 * communicator ends), NCCL_INSPECTOR_DUMP_VERBOSE, NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES, NCCL_INSPECTOR_ENABLE_P2P,
 * NCCL_INSPECTOR_DUMP_COLL_RING_SIZE and _P2P_RING_SIZE. Lines go through stdio, so a reader may find the last one cut.
 */
#define _GNU_SOURCE
#include "stub_nccl.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct record {
  enum function function;
  uint64_t sequence, bytes, called_us, start_us, end_us, exec_us;
  int peer;
};

struct ring {
  struct record *records;
  uint64_t capacity, first, count, dropped, dropped_said;
};

struct inspected {
  struct inspected *next;
  uint64_t hash;
  int rank, size, n_nodes;
  char name[NAME_BYTES];
  uint64_t n_peer_calls;
  struct ring collectives, peers;
};

static const char *const NAMES[N_FUNCTIONS] = { "Broadcast", "Reduce",  "AllGather", "ReduceScatter",
                                                "AllReduce", "Send",    "Recv" };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* over all below, and the file */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct inspected *all;
static FILE *file;
static bool is_verbose, has_peers, last_only;
static int minor; /* of format version 4 */
static long interval_us;
static uint64_t min_bytes, collectives_capacity, peers_capacity;

static long number(const char *name, long otherwise) {
  const char *value = getenv(name);
  return value && *value ? strtol(value, NULL, 0) : otherwise;
}

static uint64_t epoch_us(void) {
  struct timeval now;
  gettimeofday(&now, NULL);
  return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_usec;
}

/* ---- writing ---- */

static void write_headers(const struct inspected *comm) {
  char hostname[256] = "";
  gethostname(hostname, sizeof hostname - 1);
  fprintf(file, "\"header\":{\"id\":\"0x%lx\",", (unsigned long)comm->hash);
  if (!last_only) fprintf(file, "\"comm_name\":\"%s\",", comm->name[0] ? comm->name : "unknown");
  fprintf(file, "\"rank\":%d,\"n_ranks\":%d,\"nnodes\":%d},", comm->rank, comm->size, comm->n_nodes);
  fprintf(file, "\"metadata\":{\"inspector_output_format_version\":\"v4.%d\",\"git_rev\":\"stub\",", minor);
  fprintf(file, "\"rec_mechanism\":\"nccl_profiler_interface\",\"dump_timestamp_us\":%lu,", (unsigned long)epoch_us());
  fprintf(file, "\"hostname\":\"%s\",\"pid\":%d},", hostname, (int)getpid());
}

static void write_traces(const char *kind, const struct record *record) {
  fprintf(file, ",\"event_trace_sn\":{\"%s_start_sn\":1,\"%s_stop_sn\":2,", kind, kind);
  fputs("\"kernel_events\":[{\"channel_id\":0,\"kernel_start_sn\":3,\"kernel_stop_sn\":5,\"kernel_record_sn\":4}]}", file);
  fprintf(file, ",\"event_trace_ts\":{\"%s_start_ts\":%lu,\"%s_stop_ts\":%lu,\"kernel_events\":[{\"channel_id\":0,", kind,
          (unsigned long)record->called_us, kind, (unsigned long)record->called_us);
  fprintf(file, "\"kernel_start_ts\":%lu,\"kernel_stop_ts\":%lu,\"kernel_record_ts\":%lu}]}",
          (unsigned long)record->start_us, (unsigned long)record->end_us, (unsigned long)record->end_us);
}

static void write_bandwidths(const char *kind, const struct inspected *comm, const struct record *record) {
  double n = comm->size, factor = 1, bytes = (double)record->bytes;
  if (record->function == ALL_REDUCE) factor = 2 * (n - 1) / n;
  if (record->function == ALL_GATHER || record->function == REDUCE_SCATTER) factor = (n - 1) / n, bytes *= n;
  double gbs = record->exec_us ? bytes / (double)record->exec_us / 1e3 : 0;
  fprintf(file, "\"%s_algobw_gbs\":%f,\"%s_busbw_gbs\":%f", kind, gbs, kind, gbs * factor);
}

static void write_record(const struct inspected *comm, const struct record *record) {
  const char *kind = record->function >= SEND ? "p2p" : "coll";
  fputc('{', file);
  if (minor < 3) write_headers(comm);
  fprintf(file, "\"%s_perf\":{\"%s\":\"%s\",", kind, kind, NAMES[record->function]);
  if (minor >= 2 && record->function < SEND) fputs("\"coll_algo\":\"RING\",\"coll_proto\":\"SIMPLE\",", file);
  fprintf(file, "\"%s_sn\":%lu,", kind, (unsigned long)record->sequence);
  if (record->function >= SEND) fprintf(file, "\"p2p_peer\":%d,", record->peer);
  fprintf(file, "\"%s_msg_size_bytes\":%lu,\"%s_exec_time_us\":%lu,\"%s_timing_source\":\"kernel_gpu\",", kind,
          (unsigned long)record->bytes, kind, (unsigned long)record->exec_us, kind);
  write_bandwidths(kind, comm, record);
  if (is_verbose) write_traces(kind, record);
  fputs("}}\n", file);
}

static void write_counts(struct inspected *comm) {
  struct ring *rings[2] = { &comm->collectives, &comm->peers };
  const char *const kinds[2] = { "coll", "p2p" };
  fputc('{', file);
  write_headers(comm);
  fputs("\"dump_stats\":{", file);
  for (int i = 0; i < 2; i++) {
    struct ring *ring = rings[i];
    fprintf(file, "%s\"%s_records\":%lu,\"%s_dropped_total\":%lu,\"%s_dropped_since_last_dump\":%lu", i ? "," : "",
            kinds[i], (unsigned long)ring->count, kinds[i], (unsigned long)ring->dropped, kinds[i],
            (unsigned long)(ring->dropped - ring->dropped_said));
    ring->dropped_said = ring->dropped;
  }
  fputs("}}\n", file);
}

static void drain(const struct inspected *comm, struct ring *ring) {
  for (; ring->count > 0; ring->count--) {
    write_record(comm, &ring->records[ring->first]);
    ring->first = (ring->first + 1) % ring->capacity;
  }
}

static bool open_file(void) {
  char hostname[256] = "", path[1024];
  const char *directory = getenv("NCCL_INSPECTOR_DUMP_DIR");
  const char *job = getenv("SLURM_JOBID");
  if (file) return true;
  gethostname(hostname, sizeof hostname - 1);
  if (directory) snprintf(path, sizeof path, "%s", directory);
  else snprintf(path, sizeof path, "nccl-inspector-%s", job ? job : "unknown-jobid");
  mkdir(path, 0777);
  size_t length = strlen(path);
  snprintf(path + length, sizeof path - length, "/%s-pid%d.log", hostname, (int)getpid());
  file = fopen(path, "we");
  return file != NULL;
}

static void dump(struct inspected *comm) {
  struct ring *collectives = &comm->collectives, *peers = &comm->peers;
  bool has_news = collectives->count || peers->count || collectives->dropped != collectives->dropped_said ||
                  peers->dropped != peers->dropped_said;
  if (!has_news || !open_file()) return;
  if (minor >= 1) write_counts(comm);
  drain(comm, collectives);
  drain(comm, peers);
}

static void *run_dumps(void *argument) {
  (void)argument;
  struct timespec pause = { interval_us / 1000000, interval_us % 1000000 * 1000 };
  for (;;) {
    nanosleep(&pause, NULL);
    pthread_mutex_lock(&mutex);
    for (struct inspected *comm = all; comm; comm = comm->next) dump(comm);
    if (file) fflush(file);
    pthread_mutex_unlock(&mutex);
  }
  return NULL;
}

/* ---- noting ---- */

static void read_settings(void) {
  pthread_t thread;
  const char *version = getenv("STUB_INSPECTOR_VERSION");
  if (!version) version = "4.0";
  last_only = strcmp(version, "2.28") == 0;
  minor = last_only ? 0 : atoi(version + 2);
  is_verbose = number("NCCL_INSPECTOR_DUMP_VERBOSE", 0) != 0;
  has_peers = !last_only && number("NCCL_INSPECTOR_ENABLE_P2P", 1) != 0;
  min_bytes = (uint64_t)number("NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES", last_only ? 0 : 8192);
  collectives_capacity = (uint64_t)(last_only ? 1 : number("NCCL_INSPECTOR_DUMP_COLL_RING_SIZE", 1024));
  peers_capacity = (uint64_t)number("NCCL_INSPECTOR_DUMP_P2P_RING_SIZE", 1024);
  interval_us = number("NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS", -1);
  if (interval_us > 0 && pthread_create(&thread, NULL, run_dumps, NULL) == 0) pthread_detach(thread);
}

void inspector_open(struct ncclComm *comm) {
  if (number("NCCL_INSPECTOR_ENABLE", 0) != 1) return;
  pthread_once(&once, read_settings);
  struct inspected *inspected = calloc(1, sizeof *inspected);
  inspected->hash = comm->hash;
  inspected->rank = comm->rank;
  inspected->size = comm->size;
  inspected->n_nodes = comm->n_nodes;
  memcpy(inspected->name, comm->name, sizeof inspected->name);
  inspected->collectives.capacity = collectives_capacity;
  inspected->collectives.records = calloc(collectives_capacity, sizeof(struct record));
  inspected->peers.capacity = peers_capacity;
  inspected->peers.records = calloc(peers_capacity, sizeof(struct record));
  comm->inspected = inspected;
  pthread_mutex_lock(&mutex);
  inspected->next = all;
  all = inspected;
  pthread_mutex_unlock(&mutex);
}

void inspector_close(struct ncclComm *comm) {
  struct inspected *inspected = comm->inspected;
  if (!inspected) return;
  pthread_mutex_lock(&mutex);
  struct inspected **link = &all;
  while (*link != inspected) link = &(*link)->next;
  *link = inspected->next;
  dump(inspected);
  if (file) fflush(file);
  pthread_mutex_unlock(&mutex);
  free(inspected->collectives.records);
  free(inspected->peers.records);
  free(inspected);
  comm->inspected = NULL;
}

static void enqueue(struct ring *ring, struct record record) {
  if (ring->count == ring->capacity) {
    ring->first = (ring->first + 1) % ring->capacity;
    ring->count--;
    ring->dropped++;
  }
  ring->records[(ring->first + ring->count++) % ring->capacity] = record;
}

void inspector_note(const struct operation *operation, uint64_t start_ns, uint64_t end_ns) {
  struct inspected *comm = operation->comm->inspected;
  bool is_peer = operation->function >= SEND;
  if (!comm || operation->bytes < min_bytes || operation->bytes == 0 || (is_peer && !has_peers)) return;
  uint64_t now_us = epoch_us(), exec_us = (end_ns - start_ns) / 1000;
  struct record record = { .function = operation->function, .sequence = operation->sequence,
                           .bytes = operation->bytes, .called_us = now_us - (end_ns - operation->called_ns) / 1000,
                           .start_us = now_us - exec_us, .end_us = now_us, .exec_us = exec_us,
                           .peer = operation->peer };
  pthread_mutex_lock(&mutex);
  /* Collectives carry NCCL's number, of all calls of that function; Inspector counts sends and receives itself, together
   * and from 1, and only those that are large enough. */
  if (is_peer) record.sequence = ++comm->n_peer_calls;
  enqueue(is_peer ? &comm->peers : &comm->collectives, record);
  pthread_mutex_unlock(&mutex);
}
