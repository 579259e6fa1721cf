{{- define "pgleaderlock.pod" -}}
{"runAsNonRoot": true, "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001, "seccompProfile": {"type": "RuntimeDefault"}}
{{- end }}
{{- define "pgleaderlock.container" -}}
{"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]}}
{{- end }}
{{- define "pgleaderlock.egress" -}}
# Names, and the database. Whatever else your program talks to needs a policy of its own: they add up.
    - ports:
        - {port: 53, protocol: UDP}
        - {port: 53, protocol: TCP}
    - ports:
        - {port: {{ .Values.database.port }}, protocol: TCP}
{{- end }}
