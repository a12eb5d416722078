/* Stub libcudart.so.12: the entry points, signatures and result values of the CUDA runtime, without a GPU.
 *
 * A stream is a queue with a thread of its own, named "stub-gpu". A kernel is a stretch of time: the first of its
 * arguments points to a uint64_t of nanoseconds, which is stretched by the GPU's "slowdown" in the state file
 * ($STUB_NVML_STATE, lines of "<gpu> <key> <value>", shared with the stub NVML) as it is when the kernel begins.
 * Kernels that follow each other begin where the one before was due to end, so a late wake-up makes none of them longer.
 *
 * The threads ask for real-time priority, and keep going without: a GPU does not compete for the node's processors.
 */
#define _GNU_SOURCE
#include "stub_cudart.h"

#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>

typedef int cudaError_t;
typedef struct { unsigned x, y, z; } dim3;

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_DEVICE = 101, INVALID_HANDLE = 400, NOT_READY = 600 };
enum { MAX_STREAMS = 64, MAX_DEVICES = 16 };

struct task {
  struct task *next;
  void (*work)(void *);
  void *argument;
  uint64_t kernel_ns; /* of a kernel, which has no work */
  uint64_t enqueued_ns;
  int device;
};

struct stream {
  pthread_mutex_t mutex;
  pthread_cond_t filled, advanced;
  struct task *head, *tail;
  uint64_t enqueued, done;
  uint64_t wanted; /* the first place that somebody waits for: a host that waits is not woken for every task */
  bool is_started;
};

struct event {
  pthread_mutex_t mutex;
  struct stream *stream; /* of the last record; NULL before the first */
  uint64_t place;
  uint64_t time_ns;
};

#define NEW_STREAM \
  { .mutex = PTHREAD_MUTEX_INITIALIZER, .filled = PTHREAD_COND_INITIALIZER, .advanced = PTHREAD_COND_INITIALIZER, \
    .wanted = UINT64_MAX }

static struct stream default_stream = NEW_STREAM;
static struct stream *streams[MAX_STREAMS] = { &default_stream };
static int n_streams = 1;
static pthread_mutex_t streams_mutex = PTHREAD_MUTEX_INITIALIZER;
static __thread int current_device;

uint64_t stubNow(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ---- devices ---- */

static int physical_devices[MAX_DEVICES];
static int n_devices;
static pthread_once_t devices_once = PTHREAD_ONCE_INIT;

static void find_devices(void) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  const char *count = getenv("STUB_GPU_COUNT");
  n_devices = count ? atoi(count) : 8;
  if (n_devices > MAX_DEVICES) n_devices = MAX_DEVICES;
  for (int i = 0; i < n_devices; i++) physical_devices[i] = i;
  if (!visible) return;
  n_devices = 0;
  while (*visible && n_devices < MAX_DEVICES) {
    char *end;
    long device = strtol(visible, &end, 10);
    if (end == visible) return;
    physical_devices[n_devices++] = (int)device;
    visible = *end == ',' ? end + 1 : end;
  }
}

static int physical(int device) {
  pthread_once(&devices_once, find_devices);
  return device >= 0 && device < n_devices ? physical_devices[device] : -1;
}

int stubPhysicalDevice(void) { return physical(current_device); }

/* ---- how slow a GPU is ---- */

static double slowdowns[MAX_DEVICES];
static struct stat state_status;
static pthread_mutex_t state_mutex = PTHREAD_MUTEX_INITIALIZER;

static void read_state(const char *path) {
  char gpu[16], key[64], line[256];
  double value;
  FILE *file = fopen(path, "re");
  if (!file) return;
  for (int i = 0; i < MAX_DEVICES; i++) slowdowns[i] = 1;
  while (fgets(line, sizeof line, file)) {
    if (sscanf(line, "%15s %63s %lf", gpu, key, &value) != 3 || strcmp(key, "slowdown") != 0) continue;
    for (int i = 0; i < MAX_DEVICES; i++)
      if (gpu[0] == '*' || atoi(gpu) == i) slowdowns[i] = value;
  }
  fclose(file);
}

static double slowdown(int device) {
  const char *path = getenv("STUB_NVML_STATE");
  struct stat status;
  int gpu = physical(device);
  if (!path || gpu < 0 || gpu >= MAX_DEVICES || stat(path, &status) != 0) return 1;
  pthread_mutex_lock(&state_mutex);
  if (state_status.st_ino != status.st_ino || state_status.st_mtim.tv_nsec != status.st_mtim.tv_nsec ||
      state_status.st_mtim.tv_sec != status.st_mtim.tv_sec) {
    state_status = status;
    read_state(path);
  }
  double factor = slowdowns[gpu];
  pthread_mutex_unlock(&state_mutex);
  return factor > 0 ? factor : 1;
}

/* ---- streams ---- */

static void sleep_until(uint64_t time_ns) {
  struct timespec until = { (time_t)(time_ns / 1000000000u), (long)(time_ns % 1000000000u) };
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) != 0) {}
}

static struct task *take(struct stream *stream) {
  pthread_mutex_lock(&stream->mutex);
  while (!stream->head) pthread_cond_wait(&stream->filled, &stream->mutex);
  struct task *task = stream->head;
  stream->head = task->next;
  if (!stream->head) stream->tail = NULL;
  pthread_mutex_unlock(&stream->mutex);
  return task;
}

static void *run_stream(void *argument) {
  struct stream *stream = argument;
  struct sched_param realtime = { .sched_priority = 1 };
  uint64_t free_ns = 0; /* when the GPU has finished what it was given so far */
  prctl(PR_SET_NAME, "stub-gpu");
  prctl(PR_SET_TIMERSLACK, 1);
  pthread_setschedparam(pthread_self(), SCHED_FIFO, &realtime);
  for (;;) {
    struct task *task = take(stream);
    if (task->work) {
      task->work(task->argument);
      free_ns = stubNow();
    } else {
      uint64_t start_ns = task->enqueued_ns > free_ns ? task->enqueued_ns : free_ns;
      free_ns = start_ns + (uint64_t)((double)task->kernel_ns * slowdown(task->device));
      sleep_until(free_ns);
    }
    free(task);
    pthread_mutex_lock(&stream->mutex);
    if (++stream->done >= stream->wanted) {
      stream->wanted = UINT64_MAX;
      pthread_cond_broadcast(&stream->advanced);
    }
    pthread_mutex_unlock(&stream->mutex);
  }
  return NULL;
}

static struct stream *stream_of(void *handle) {
  /* 0, 1 and 2 are the default stream, the legacy one and that of the thread. */
  return (uintptr_t)handle <= 2 ? &default_stream : handle;
}

static void start(struct stream *stream) {
  pthread_t thread;
  pthread_attr_t detached;
  pthread_attr_init(&detached);
  pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
  stream->is_started = pthread_create(&thread, &detached, run_stream, stream) == 0;
  pthread_attr_destroy(&detached);
}

static uint64_t enqueue(struct stream *stream, struct task task) {
  struct task *copy = malloc(sizeof *copy);
  *copy = task;
  copy->next = NULL;
  copy->device = current_device;
  copy->enqueued_ns = stubNow();
  pthread_mutex_lock(&stream->mutex);
  if (!stream->is_started) start(stream);
  if (stream->tail) stream->tail->next = copy;
  else stream->head = copy;
  stream->tail = copy;
  uint64_t place = ++stream->enqueued;
  pthread_cond_signal(&stream->filled);
  pthread_mutex_unlock(&stream->mutex);
  return place;
}

void stubStreamEnqueue(void *stream, void (*work)(void *), void *argument) {
  enqueue(stream_of(stream), (struct task){ .work = work, .argument = argument });
}

static void wait_for(struct stream *stream, uint64_t place) {
  pthread_mutex_lock(&stream->mutex);
  while (stream->done < place) {
    if (place < stream->wanted) stream->wanted = place;
    pthread_cond_wait(&stream->advanced, &stream->mutex);
  }
  pthread_mutex_unlock(&stream->mutex);
}

static uint64_t last_place(struct stream *stream) {
  pthread_mutex_lock(&stream->mutex);
  uint64_t place = stream->enqueued;
  pthread_mutex_unlock(&stream->mutex);
  return place;
}

static bool is_done(struct stream *stream, uint64_t place) {
  pthread_mutex_lock(&stream->mutex);
  bool done = stream->done >= place;
  pthread_mutex_unlock(&stream->mutex);
  return done;
}

cudaError_t cudaStreamCreateWithPriority(void **handle, unsigned flags, int priority) {
  (void)flags, (void)priority;
  if (!handle) return INVALID_VALUE;
  struct stream *stream = malloc(sizeof *stream);
  *stream = (struct stream)NEW_STREAM;
  pthread_mutex_lock(&streams_mutex);
  bool fits = n_streams < MAX_STREAMS;
  if (fits) streams[n_streams++] = stream;
  pthread_mutex_unlock(&streams_mutex);
  if (!fits) {
    free(stream);
    return INVALID_VALUE;
  }
  *handle = stream;
  return SUCCESS;
}

cudaError_t cudaStreamCreateWithFlags(void **handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}

cudaError_t cudaStreamCreate(void **handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }

/* The stream and its thread stay: whoever destroys one has waited for it, and ends soon after. */
cudaError_t cudaStreamDestroy(void *handle) { return handle ? SUCCESS : INVALID_HANDLE; }

cudaError_t cudaStreamSynchronize(void *handle) {
  struct stream *stream = stream_of(handle);
  wait_for(stream, last_place(stream));
  return SUCCESS;
}

cudaError_t cudaStreamQuery(void *handle) {
  struct stream *stream = stream_of(handle);
  return is_done(stream, last_place(stream)) ? SUCCESS : NOT_READY;
}

cudaError_t cudaDeviceSynchronize(void) {
  pthread_mutex_lock(&streams_mutex);
  int count = n_streams;
  pthread_mutex_unlock(&streams_mutex);
  for (int i = 0; i < count; i++) wait_for(streams[i], last_place(streams[i]));
  return SUCCESS;
}

/* ---- events ---- */

cudaError_t cudaEventCreateWithFlags(void **handle, unsigned flags) {
  (void)flags;
  if (!handle) return INVALID_VALUE;
  struct event *event = calloc(1, sizeof *event);
  pthread_mutex_init(&event->mutex, NULL);
  *handle = event;
  return SUCCESS;
}

cudaError_t cudaEventCreate(void **handle) { return cudaEventCreateWithFlags(handle, 0); }

cudaError_t cudaEventDestroy(void *handle) {
  struct event *event = handle;
  if (!event) return INVALID_HANDLE;
  if (event->stream) stubStreamEnqueue(event->stream, free, event); /* after its last record */
  else free(event);
  return SUCCESS;
}

static void stamp(void *argument) {
  struct event *event = argument;
  pthread_mutex_lock(&event->mutex);
  event->time_ns = stubNow();
  pthread_mutex_unlock(&event->mutex);
}

cudaError_t cudaEventRecord(void *handle, void *stream) {
  struct event *event = handle;
  if (!event) return INVALID_HANDLE;
  uint64_t place = enqueue(stream_of(stream), (struct task){ .work = stamp, .argument = event });
  pthread_mutex_lock(&event->mutex);
  event->stream = stream_of(stream);
  event->place = place;
  pthread_mutex_unlock(&event->mutex);
  return SUCCESS;
}

static struct event last_record(struct event *event) {
  pthread_mutex_lock(&event->mutex);
  struct event copy = { .stream = event->stream, .place = event->place, .time_ns = event->time_ns };
  pthread_mutex_unlock(&event->mutex);
  return copy;
}

cudaError_t cudaEventSynchronize(void *handle) {
  if (!handle) return INVALID_HANDLE;
  struct event event = last_record(handle);
  if (event.stream) wait_for(event.stream, event.place);
  return SUCCESS;
}

cudaError_t cudaEventQuery(void *handle) {
  if (!handle) return INVALID_HANDLE;
  struct event event = last_record(handle);
  return !event.stream || is_done(event.stream, event.place) ? SUCCESS : NOT_READY;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, void *start, void *end) {
  if (!start || !end || !milliseconds) return INVALID_HANDLE;
  if (cudaEventQuery(start) != SUCCESS || cudaEventQuery(end) != SUCCESS) return NOT_READY;
  *milliseconds = (float)((double)(last_record(end).time_ns - last_record(start).time_ns) / 1e6);
  return SUCCESS;
}

static void wait_for_event(void *argument) {
  struct event *event = argument;
  wait_for(event->stream, event->place);
  free(event);
}

cudaError_t cudaStreamWaitEvent(void *stream, void *handle, unsigned flags) {
  (void)flags;
  if (!handle) return INVALID_HANDLE;
  struct event *copy = malloc(sizeof *copy);
  *copy = last_record(handle);
  if (copy->stream) stubStreamEnqueue(stream, wait_for_event, copy);
  else free(copy);
  return SUCCESS;
}

/* ---- kernels, devices, memory ---- */

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                             void *stream) {
  (void)function, (void)grid, (void)block, (void)shared_bytes;
  if (!arguments || !arguments[0]) return INVALID_VALUE;
  enqueue(stream_of(stream), (struct task){ .kernel_ns = *(uint64_t *)arguments[0] });
  return SUCCESS;
}

cudaError_t cudaSetDevice(int device) {
  if (physical(device) < 0) return INVALID_DEVICE;
  current_device = device;
  return SUCCESS;
}

cudaError_t cudaGetDevice(int *device) {
  if (!device) return INVALID_VALUE;
  *device = current_device;
  return SUCCESS;
}

cudaError_t cudaGetDeviceCount(int *count) {
  if (!count) return INVALID_VALUE;
  pthread_once(&devices_once, find_devices);
  *count = n_devices;
  return SUCCESS;
}

cudaError_t cudaMalloc(void **memory, size_t bytes) {
  if (!memory) return INVALID_VALUE;
  *memory = calloc(1, bytes ? bytes : 1);
  return *memory ? SUCCESS : 2;
}

cudaError_t cudaFree(void *memory) {
  free(memory);
  return SUCCESS;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
  if (!version) return INVALID_VALUE;
  *version = 12090;
  return SUCCESS;
}

cudaError_t cudaGetLastError(void) { return SUCCESS; }

const char *cudaGetErrorString(cudaError_t error) {
  return error == SUCCESS ? "no error" : error == NOT_READY ? "device not ready" : "invalid argument";
}
