// Where an answer ends, whether it is an error, and how many records it has; right however the bytes are cut.
#include "load.h"

#include <stdlib.h>
#include <string.h>

#define PEEKED 512  // of a message of NATS: enough for its status or error

long count_marks(const char *data, size_t size) {
    long found = 0;
    for (size_t i = 0; i < size; i++) found += data[i] == MARK;
    return found;
}

void answers_reset(Answers *answers) {
    answers->replies = answers->marks = 0;
    answers->status = 0;
    answers->kept_len = 0;
}

static void keep(Answers *answers, const char *data, size_t size) {
    if (answers->kept_len + size >= answers->kept_room) {
        answers->kept_room = 2 * (answers->kept_len + size) + 4096;
        if (answers->kept_room > KEPT_BYTES_MAX) fail("an answer is longer than %d bytes", KEPT_BYTES_MAX);
        answers->kept = realloc(answers->kept, answers->kept_room);
        if (!answers->kept) fail("out of memory");
    }
    memcpy(answers->kept + answers->kept_len, data, size);
    answers->kept_len += size;
    answers->kept[answers->kept_len] = 0;
}

// Add to the head; returns how many bytes were taken.
static size_t add_to_head(Answers *answers, const char *data, size_t size) {
    if (answers->head_len + size > HEAD_BYTES_MAX) fail("the head of an answer is too long: %.200s", answers->head);
    memcpy(answers->head + answers->head_len, data, size);
    answers->head_len += (int)size;
    answers->head[answers->head_len] = 0;
    return size;
}

// Collect a line; true when it is complete, in answers->head.
static bool collect_line(Answers *answers, const char **data, size_t *size) {
    const char *end = memchr(*data, '\n', *size);
    size_t taken = add_to_head(answers, *data, end ? (size_t)(end - *data) + 1 : *size);
    *data += taken;
    *size -= taken;
    return end != NULL;
}

static void feed_http(Answers *answers, const char *data, size_t size) {
    while (size) {
        if (answers->skip) {
            size_t taken = size < (size_t)answers->skip ? size : (size_t)answers->skip;
            answers->marks += count_marks(data, taken);
            data += taken;
            size -= taken;
            if (!(answers->skip -= (int64_t)taken)) answers->replies++;
            continue;
        }
        // A head is collected by lines: it may be cut anywhere, and its end too.
        if (!collect_line(answers, &data, &size)) return;
        if (answers->head_len < 4 || memcmp(answers->head + answers->head_len - 4, "\r\n\r\n", 4)) continue;
        if (strncmp(answers->head, "HTTP/1.1 2", 10)) fail("refused: %.300s%.*s", answers->head, (int)(size < 500 ? size : 500), data);
        const char *length = strcasestr(answers->head, "\r\ncontent-length:");
        if (!length) fail("an answer without Content-Length: %.300s", answers->head);
        answers->skip = atoll(length + 17);
        answers->head_len = 0;
        if (!answers->skip) answers->replies++;
    }
}

static void element_ends(Answers *answers) {
    if (!--answers->pending) answers->replies++;
}

static void feed_resp(Answers *answers, const char *data, size_t size) {
    while (size) {
        if (answers->skip) {
            size_t taken = size < (size_t)answers->skip ? size : (size_t)answers->skip;
            answers->marks += count_marks(data, taken);
            data += taken;
            size -= taken;
            if (!(answers->skip -= (int64_t)taken)) element_ends(answers);
            continue;
        }
        if (!collect_line(answers, &data, &size)) return;
        answers->head_len = 0;
        // An array's elements are counted instead of nested: the reply is complete when none is missing.
        if (!answers->pending) answers->pending = 1;
        long long number = atoll(answers->head + 1);
        switch (answers->head[0]) {
        case '+':
        case ':':
            element_ends(answers);
            break;
        case '$':
            if (number < 0)
                element_ends(answers);
            else
                answers->skip = number + 2;
            break;
        case '*':
            if (number > 0)
                answers->pending += number - 1;
            else
                element_ends(answers);
            break;
        default:
            fail("refused: %.300s", answers->head);
        }
    }
}

// A message of NATS has come: an error is a status in its header, or JSON with an error.
static void judge_message(Answers *answers) {
    const char *text = answers->head;
    if (!strncmp(text, "NATS/1.0 ", 9)) {
        answers->status = atoi(text + 9);
        if (answers->status >= 400 && answers->status != 408) fail("refused: %.300s", text);
    } else if (strstr(text, "\"error\"")) {
        fail("refused: %.300s", text);
    }
    answers->head_len = 0;
    answers->replies++;
}

static void feed_nats(Answers *answers, const char *data, size_t size) {
    while (size) {
        if (answers->skip) {
            size_t taken = size < (size_t)answers->skip ? size : (size_t)answers->skip;
            answers->marks += count_marks(data, taken);
            size_t room = answers->head_len < PEEKED ? (size_t)(PEEKED - answers->head_len) : 0;
            add_to_head(answers, data, taken < room ? taken : room);
            data += taken;
            size -= taken;
            if (!(answers->skip -= (int64_t)taken)) judge_message(answers);
            continue;
        }
        if (!collect_line(answers, &data, &size)) return;
        char *line = answers->head;
        if (!strncmp(line, "MSG ", 4) || !strncmp(line, "HMSG ", 5)) {
            line[answers->head_len - 2] = 0;  // the size is the last word
            answers->skip = atoll(strrchr(line, ' ') + 1) + 2;
        } else if (!strncmp(line, "PONG", 4)) {
            answers->replies++;
        } else if (strncmp(line, "PING", 4) && strncmp(line, "INFO", 4) && strncmp(line, "+OK", 3)) {
            fail("refused: %.300s", line);
        }
        answers->head_len = 0;
    }
}

void answers_feed(Answers *answers, const char *data, size_t size) {
    if (answers->keeps) keep(answers, data, size);
    if (answers->protocol == HTTP)
        feed_http(answers, data, size);
    else if (answers->protocol == RESP)
        feed_resp(answers, data, size);
    else
        feed_nats(answers, data, size);
}
