// A server that sends requests[0] after each BYTES bytes and does nothing else: what the generator can do at most.
#include "load.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define EVENTS_MAX 256

typedef struct {
    int fd;
    int64_t due;   // bytes that the request still lacks
    bool greeted;  // NATS: the hello has been answered
    const char *sending;
    size_t sending_len;
} Connection;

static void send_rest(int epoll, Connection *connection) {
    ssize_t sent = 1;
    while (connection->sending_len && sent > 0) {
        sent = send(connection->fd, connection->sending, connection->sending_len, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent <= 0) break;
        connection->sending += sent;
        connection->sending_len -= (size_t)sent;
    }
    if (sent > 0) return;
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT, .data.ptr = connection};
    epoll_ctl(epoll, EPOLL_CTL_MOD, connection->fd, &event);
}

static void accept_one(int epoll, int listener, int64_t first_due, bool greeted) {
    Connection *connection = allocate(sizeof *connection);
    int on = 1;
    *connection = (Connection){.fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC), .due = first_due, .greeted = greeted};
    if (connection->fd < 0) fail("accept: %s", strerror(errno));
    setsockopt(connection->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
    epoll_ctl(epoll, EPOLL_CTL_ADD, connection->fd, &event);
}

void run_null(const Plan *plan) {
    static char buffer[RECEIVE_BYTES];
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), epoll = epoll_create1(EPOLL_CLOEXEC);
    if (bind(listener, (struct sockaddr *)&address, size) || listen(listener, 1024)) fail("listen: %s", strerror(errno));
    getsockname(listener, (struct sockaddr *)&address, &size);
    struct epoll_event event = {.events = EPOLLIN}, events[EVENTS_MAX];
    epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    int64_t hello = (int64_t)plan->hello.length, request = plan->most;
    for (;;) {
        int found = epoll_wait(epoll, events, EVENTS_MAX, -1);
        for (int i = 0; i < found; i++) {
            Connection *connection = events[i].data.ptr;
            if (!connection) {
                accept_one(epoll, listener, hello ? hello : request, !hello);
                continue;
            }
            if (events[i].events & EPOLLOUT) {
                event = (struct epoll_event){.events = EPOLLIN, .data.ptr = connection};
                epoll_ctl(epoll, EPOLL_CTL_MOD, connection->fd, &event);
                send_rest(epoll, connection);
            }
            if (!(events[i].events & ~(uint32_t)EPOLLOUT)) continue;
            ssize_t came = recv(connection->fd, buffer, sizeof buffer, MSG_DONTWAIT);
            if (came < 0 && errno == EAGAIN) continue;
            if (came <= 0) {
                close(connection->fd);  // its few bytes of memory are kept: another event of this turn may name it
                continue;
            }
            connection->due -= came;
            if (connection->due > 0) continue;
            connection->sending = connection->greeted ? plan->steps[0].text : "PONG\r\n";
            connection->sending_len = connection->greeted ? plan->steps[0].length : 6;
            connection->greeted = true;
            connection->due = request;
            send_rest(epoll, connection);
        }
    }
}
