// The clock, percentiles, processor time of the servers, and the output.
#include "load.h"

#include <dirent.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("load: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(1);
}

void *allocate(size_t bytes) {
    void *memory = calloc(1, bytes ? bytes : 1);
    if (!memory) fail("out of memory");
    return memory;
}

static int64_t clock_ns(clockid_t which) {
    struct timespec time;
    clock_gettime(which, &time);
    return time.tv_sec * SECOND_NS + time.tv_nsec;
}

int64_t now_ns(void) { return clock_ns(CLOCK_MONOTONIC); }

// ---- latencies: a histogram whose buckets are 1/256 of their value wide, so that memory is bounded and nothing is sorted

#define FINE 256
#define BUCKETS (57 * FINE)
#define KINDS 2  // a queue has claims and acks

static struct {
    long buckets[BUCKETS], count;
    int64_t most;
} latencies[KINDS];

void latency_keep(int which, int64_t ns) {
    uint64_t value = ns > 0 ? (uint64_t)ns : 0;
    int shift = value < FINE ? -1 : 55 - __builtin_clzll(value);
    size_t bucket = shift < 0 ? value : (size_t)(shift + 1) * FINE + (value >> shift) - FINE;
    latencies[which].buckets[bucket]++;
    latencies[which].count++;
    if (ns > latencies[which].most) latencies[which].most = ns;
}

long latency_count(int which) { return latencies[which].count; }

static double percentile_ms(int which, double share) {
    long before = (long)(latencies[which].count * share);
    for (size_t bucket = 0; bucket < BUCKETS; bucket++) {
        before -= latencies[which].buckets[bucket];
        if (before >= 0) continue;
        if (bucket < FINE) return bucket / 1e6;
        int shift = (int)(bucket / FINE) - 1;
        double middle = (double)((bucket % FINE + FINE) << shift) + (double)(1LL << shift) / 2;
        return (middle < latencies[which].most ? middle : (double)latencies[which].most) / 1e6;
    }
    return latencies[which].most / 1e6;
}

// ---- processor time: user and system of all threads, in nanoseconds; the ticks of /proc/PID/stat are too coarse

static int64_t process_ns(int pid) {
    char path[300];
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *threads = opendir(path);
    if (!threads) fail("no process %d", pid);
    int64_t sum = 0;
    for (struct dirent *thread; (thread = readdir(threads));) {
        if (thread->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "/proc/%d/task/%.200s/schedstat", pid, thread->d_name);
        FILE *file = fopen(path, "r");
        long long ran = 0;
        if (file && fscanf(file, "%lld", &ran) == 1) sum += ran;
        if (file) fclose(file);
    }
    closedir(threads);
    return sum;
}

static int64_t began_ns, ended_ns, own_ns, server_ns[PIDS_MAX];

void figures_begin(const Plan *plan) {
    memset(latencies, 0, sizeof latencies);
    for (int i = 0; i < plan->pid_count; i++) server_ns[i] = process_ns(plan->pids[i].pid);
    own_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
    began_ns = now_ns();
}

void figures_end(const Plan *plan) {
    ended_ns = now_ns();
    own_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID) - own_ns;
    for (int i = 0; i < plan->pid_count; i++) server_ns[i] = process_ns(plan->pids[i].pid) - server_ns[i];
}

double figures_seconds(void) { return (double)(ended_ns - began_ns) / SECOND_NS; }

// ---- the output

void print_begin(void) { printf("{\"seconds\": %.6f, \"began_at\": %.6f", figures_seconds(), began_ns / 1e9); }

void print_number(const char *name, double value, int digits) { printf(", \"%s\": %.*f", name, digits, value); }

void print_latencies(int which, const char *prefix) {
    static const struct {
        const char *name;
        double share;
    } shown[] = {{"p50", 0.5}, {"p90", 0.9}, {"p99", 0.99}, {"p999", 0.999}};
    if (!latencies[which].count) return;
    for (size_t i = 0; i < sizeof shown / sizeof *shown; i++)
        printf(", \"%s%s_ms\": %.4f", prefix, shown[i].name, percentile_ms(which, shown[i].share));
    printf(", \"%smax_ms\": %.4f", prefix, latencies[which].most / 1e6);
}

// Processor time by role, in total and for each of the counted units.
void print_end(const Plan *plan, double count) {
    const char *roles[PIDS_MAX + 1] = {"load"};
    int64_t used[PIDS_MAX + 1] = {own_ns};
    int known = 1;
    for (int i = 0; i < plan->pid_count; i++) {
        int at = 0;
        while (at < known && strcmp(roles[at], plan->pids[i].role)) at++;
        if (at == known) roles[known++] = plan->pids[i].role;
        used[at] += server_ns[i];
    }
    print_number("count", count, 0);
    fputs(", \"cpu_s\": {", stdout);
    for (int i = 0; i < known; i++) printf("%s\"%s\": %.6f", i ? ", " : "", roles[i], used[i] / 1e9);
    fputs("}, \"cpu_us_each\": {", stdout);
    for (int i = 0; i < known; i++)
        printf("%s\"%s\": %.3f", i ? ", " : "", roles[i], count > 0 ? used[i] / 1e3 / count : 0.0);
    puts("}}");
}
